"""A classifier of texts in Hugging Face's Trainer, with its own arguments and a data collator.

Faults: checkpointing (gradient_checkpointing is on), unused (find_unused_parameters is on, as in
ai2cm/ace#109), longest (each text is padded to the model's longest, as in
deepspeedai/DeepSpeedExamples#849).
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--max_steps", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--fault", default="none")
arguments = parser.parse_args()

LONGEST = 96
draw = torch.Generator().manual_seed(5)
lengths = torch.randint(28, 36, (2048,), generator=draw).tolist()
texts = [torch.randint(5, 900, (length,), generator=draw).tolist() for length in lengths]
dataset = Dataset.from_dict({"input_ids": texts, "labels": [text[0] % 4 for text in texts]})


def collate(features):
    rows = [feature["input_ids"] for feature in features]
    width = LONGEST if arguments.fault == "longest" else max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.tensor([feature["labels"] for feature in features])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


config = BertConfig(
    vocab_size=900,
    hidden_size=128,
    num_hidden_layers=arguments.layers,
    num_attention_heads=4,
    intermediate_size=512,
    max_position_embeddings=LONGEST,
    num_labels=4,
)
with tempfile.TemporaryDirectory() as folder:
    training = TrainingArguments(
        folder,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.batch_size,
        gradient_checkpointing=arguments.fault == "checkpointing",
        ddp_find_unused_parameters=arguments.fault == "unused",
        ddp_backend="gloo",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=20,
        disable_tqdm=True,
    )
    model = BertForSequenceClassification(config)
    Trainer(model=model, args=training, train_dataset=dataset, data_collator=collate).train()
