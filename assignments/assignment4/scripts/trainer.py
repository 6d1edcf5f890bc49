"""A language model in the hands of Hugging Face's Trainer."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(Dataset):
    """Random tokens; with ``uneven`` most texts are short, and padded to the longest of a batch."""

    def __init__(self, tokens: int, uneven: bool) -> None:
        self.tokens, self.uneven = tokens, uneven

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = self.tokens
        if self.uneven:
            share = torch.rand((), generator=generator) ** 3
            length = 8 + int(share * 3 * self.tokens)
        return {"input_ids": torch.randint(3, 500, (length,), generator=generator)}


def padded(texts: list[dict]) -> dict[str, torch.Tensor]:
    """Returns a batch, padded to its longest text."""
    longest = max(len(text["input_ids"]) for text in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text["input_ids"])] = text["input_ids"]
        mask[row, : len(text["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--uneven", type=int, default=0)
parser.add_argument("--accumulation", type=int, default=1)
options = parser.parse_args()
config = GPT2Config(vocab_size=500, n_positions=512, n_embd=128, n_layer=3, n_head=4)
with tempfile.TemporaryDirectory() as folder:
    Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulation,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            logging_steps=25,
            disable_tqdm=True,
        ),
        train_dataset=Texts(options.tokens, bool(options.uneven)),
        data_collator=padded,
    ).train()
