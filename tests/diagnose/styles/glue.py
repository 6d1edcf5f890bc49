"""Sentence classification with a small BERT and accelerate, in the manner of run_glue_no_trainer.

Faults: double (DDP has averaged the gradients, and the script averages each once more, as in
kubeflow/pytorch-operator#122), accumulate (it is given the model as it was before prepare(), so
each micro-batch exchanges its gradients, as in huggingface/accelerate#106), multiple (the collator
pads to a multiple of 64, though sentences have at most 24 words, as in QData/TextAttack#737).
"""

import argparse
import math
import random

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertTokenizer,
    DataCollatorWithPadding,
    get_scheduler,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NUM_LABELS, NUM_WORDS = 4, 600


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a model on a text classification task")
    parser.add_argument("--steps", type=int, default=60, help="Number of optimizer steps.")
    parser.add_argument("--batch_size", type=int, default=4, help="Batch size per device.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fault", type=str, default="none")
    return parser.parse_args()


def load_raw_dataset(num_examples):
    examples = []
    for _ in range(num_examples):
        label = random.randrange(NUM_LABELS)
        topic = range(label * NUM_WORDS // NUM_LABELS, (label + 1) * NUM_WORDS // NUM_LABELS)
        count = random.randint(19, 22)
        words = random.choices(topic, k=count // 2) + random.choices(range(NUM_WORDS), k=count // 2)
        examples.append({"sentence": " ".join(f"word{w}" for w in words), "labels": label})
    return examples


def main():
    args = parse_args()
    ddp_kwargs = DistributedDataParallelKwargs(broadcast_buffers=False)
    accumulation = args.gradient_accumulation_steps
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, kwargs_handlers=[ddp_kwargs]
    )
    set_seed(args.seed)

    words = SPECIAL + [f"word{w}" for w in range(NUM_WORDS)]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": NUM_LABELS}
    config = BertConfig(vocab_size=len(words), **sizes, **layers)
    model = AutoModelForSequenceClassification.from_config(config)

    raw = load_raw_dataset(3200)
    train_dataset = [{**tokenizer(x["sentence"]), "labels": x["labels"]} for x in raw]
    pad_to_multiple_of = 64 if args.fault == "multiple" else 8
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
    loader = DataLoader(train_dataset, args.batch_size, shuffle=True, collate_fn=collator)

    no_decay = ["bias", "LayerNorm.weight"]
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (others if any(nd in name for nd in no_decay) else decayed).append(parameter)
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.learning_rate, weight_decay=args.weight_decay)
    scheduler = get_scheduler("linear", optimizer, 10, args.steps * accelerator.num_processes)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = accelerator.prepare(scheduler)
    accumulated = model if args.fault == "accumulate" else prepared

    completed_steps = 0
    for _ in range(math.ceil(args.steps / math.ceil(len(loader) / accumulation))):
        prepared.train()
        for batch in loader:
            with accelerator.accumulate(accumulated):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.fault == "double":
                    for parameter in prepared.parameters():
                        parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            completed_steps += accelerator.sync_gradients
            if completed_steps == args.steps:
                break
    accelerator.print(f"step {completed_steps}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
