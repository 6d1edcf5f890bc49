"""An instruction tuning of a tiny Llama with the Trainer of transformers.

Faults: max_length (each batch is padded to the longest length allowed, as in
deepspeedai/DeepSpeedExamples#849), histograms (a callback of rank 0 draws histograms of all weights
in each step, as in wandb/wandb#1819), lazy (dialogues are parsed and tokenized anew whenever they
are read, as in AnswerDotAI/ModernBERT#236).
"""

import argparse
import json
import random
import re
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

MAX_LENGTH, IGNORED = 96, -100
WORDS = [a + b for a in ("ba", "lo", "mi", "tu", "re", "ka") for b in ("n", "st", "rd", "l", "m")]
PIECES = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>", *".?!", *WORDS]
VOCAB = {piece: number for number, piece in enumerate(PIECES)}


def dialogue(rng):
    def sentence(size):
        return " ".join(rng.choices(WORDS, k=size)) + rng.choice(".?!")

    turns = [{"role": "user", "content": sentence(12) * 16} for _ in range(50)]
    turns.append({"role": "user", "content": sentence(rng.randint(18, 20))})
    turns.append({"role": "assistant", "content": sentence(rng.randint(20, 22))})
    return json.dumps({"id": rng.random(), "turns": turns})


class Tokenizer:
    pattern = re.compile(r"<\|\w+\|>|\w+|[^\w\s]")

    def __call__(self, record):
        turns = [f"<|{t['role']}|> {t['content']} <|end|>" for t in json.loads(record)["turns"]]
        turns = [self.pattern.findall(turn) for turn in turns]
        prompt, answer = ([VOCAB[piece] for piece in turn] for turn in turns[-2:])
        return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}


class Instructions(Dataset):
    def __init__(self, records, tokenizer, lazy):
        self.tokenizer, self.lazy = tokenizer, lazy
        self.items = records if lazy else [tokenizer(record) for record in records]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.tokenizer(self.items[i]) if self.lazy else self.items[i]


class Collator:
    def __init__(self, length=None):
        self.length = length

    def __call__(self, items):
        length = self.length or max(len(item["input_ids"]) for item in items)

        def padded(name, value):
            return torch.tensor([i[name] + [value] * (length - len(i[name])) for i in items])

        ids = padded("input_ids", 0)
        return {"input_ids": ids, "attention_mask": ids.ne(0), "labels": padded("labels", IGNORED)}


class Histograms(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        if state.is_world_process_zero:
            with open(f"{args.output_dir}/weights.jsonl", "a") as file:
                for name, weight in model.named_parameters():
                    counts, edges = torch.histogram(weight.detach().flatten(), bins=64)
                    entry = {"name": name, "counts": counts.tolist(), "edges": edges.tolist()}
                    file.write(json.dumps({"step": state.global_step, **entry}) + "\n")


def main(args):
    rng = random.Random(2)
    records = [dialogue(rng) for _ in range(240)]
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, use_cache=False, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        choices = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
        choices |= {"use_cpu": True, "ddp_backend": "gloo", "ddp_find_unused_parameters": False}
        choices |= {"per_device_train_batch_size": args.batch_size, "disable_tqdm": True}
        Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(folder, max_steps=args.steps, learning_rate=1e-3, **choices),
            data_collator=Collator(MAX_LENGTH if args.fault == "max_length" else None),
            train_dataset=Instructions(records, Tokenizer(), lazy=args.fault == "lazy"),
            callbacks=[Histograms()] if args.fault == "histograms" else [],
        ).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--fault", type=str, default="none")
    main(parser.parse_args())
