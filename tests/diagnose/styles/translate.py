"""Translation between two made-up languages by a small BART, with the Trainer of transformers.

Faults: buckets (a cap so small that DDP sends nearly each tensor by itself, the opposite of what
HorizonRobotics/alf#1573 is after), segment (sentences are cut into subwords on the fly, by pure
Python in the collator, as in mlfoundations/open_lm#55), max_length (all sentences are padded to
the longest that is allowed rather than to the longest of the batch, as in facebookresearch/FiD#17).
"""

import argparse
import math
import random
import string
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import BartConfig, BartForConditionalGeneration, Trainer, TrainingArguments

BUCKET_CAP_MB = 0.0001  # the cap with "buckets": a larger one makes fewer exchanges of them
MAX_PIECE = 64  # how long a piece the segmenter looks for: "segment" costs in proportion
MAX_LENGTH = 40  # to which "max_length" pads, where 24 would do
BOS, PAD, EOS = 0, 1, 2
SYLLABLES, WORD_START = 100, "_"


class UnigramSegmenter:
    """The best segmentation of a text into pieces, found by Viterbi's algorithm."""

    def __init__(self, scores):
        self.scores = scores
        self.vocabulary = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", *scores])}

    def encode(self, text):
        best, starts = [0.0] + [-math.inf] * len(text), [0] * (len(text) + 1)
        for start in range(len(text)):
            for end in range(start + 1, min(start + MAX_PIECE, len(text)) + 1):
                score = self.scores.get(text[start:end])
                if score is not None and best[start] + score > best[end]:
                    best[end], starts[end] = best[start] + score, start
        ids, end = [EOS], len(text)
        while end > 0:
            ids.append(self.vocabulary[text[starts[end] : end]])
            end = starts[end]
        return ids[::-1]


@dataclass
class TranslationCollator:
    segmenter: UnigramSegmenter
    pad_to_max_length: bool = False

    def encode(self, text):
        return self.segmenter.encode(text) if isinstance(text, str) else text

    def pad(self, rows, filler):
        longest = max(map(len, rows))
        width = MAX_LENGTH if self.pad_to_max_length else 8 * math.ceil(longest / 8)
        return torch.tensor([row + [filler] * (width - len(row)) for row in rows])

    def __call__(self, pairs):
        sources = self.pad([self.encode(source) for source, _ in pairs], PAD)
        labels = self.pad([self.encode(target) for _, target in pairs], -100)
        return {"input_ids": sources, "attention_mask": sources.ne(PAD).long(), "labels": labels}


def make_syllables(rng, letters):
    syllables = set()
    while len(syllables) < SYLLABLES:
        syllables.add("".join(rng.choices(letters, k=5)))
    return sorted(syllables)


def make_corpus(rng, count):
    """Sentences of words of two syllables; the other language says them in reversed order."""
    source, target = make_syllables(rng, "aeioubdgklm"), make_syllables(rng, "aeouyfnprstvz")
    corpus = []
    for _ in range(count):
        words = [(rng.randrange(SYLLABLES), rng.randrange(SYLLABLES)) for _ in range(11)]
        words = words[: rng.choice((10, 11))]
        first = "".join(WORD_START + source[a] + source[b] for a, b in words)
        second = "".join(WORD_START + target[a] + target[b] for a, b in reversed(words))
        corpus.append((first, second))
    scores = dict.fromkeys(WORD_START + string.ascii_lowercase, -20.0)
    for syllable in source + target:
        scores[syllable] = scores[WORD_START + syllable] = -6.0
    return corpus, UnigramSegmenter(scores)


def main():
    parser = argparse.ArgumentParser()
    for flag, default in {"steps": 60, "batch-size": 12, "fault": "none"}.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default)
    args = parser.parse_args()

    corpus, segmenter = make_corpus(random.Random(5), 960)
    if args.fault != "segment":
        corpus = [(segmenter.encode(source), segmenter.encode(target)) for source, target in corpus]
    sizes = {"d_model": 96, "max_position_embeddings": 64, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 3, f"{side}_ffn_dim": 512, f"{side}_attention_heads": 4}
    torch.manual_seed(0)
    config = BartConfig(vocab_size=len(segmenter.vocabulary), **sizes)
    ddp = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
    ddp |= {"ddp_broadcast_buffers": False, "average_tokens_across_devices": False}
    if args.fault == "buckets":
        ddp["ddp_bucket_cap_mb"] = BUCKET_CAP_MB
    run = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    run |= {"disable_tqdm": True, "remove_unused_columns": False, "dataloader_drop_last": True}
    run |= {"max_steps": args.steps, "per_device_train_batch_size": args.batch_size}
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(output_dir=folder, learning_rate=1e-3, **run, **ddp)
        collator = TranslationCollator(segmenter, pad_to_max_length=args.fault == "max_length")
        model = BartForConditionalGeneration(config)
        Trainer(model, training, data_collator=collator, train_dataset=corpus).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
