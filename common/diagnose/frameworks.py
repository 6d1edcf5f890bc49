"""Changes in the words of who trains: an argument of Trainer or accelerate, not of a library."""

from __future__ import annotations

import re
from dataclasses import replace

from common.diagnose.evidence.case import Case, Verdict
from common.diagnose.evidence.evidence import FACTS

DDP, NUMBER = r"DistributedDataParallel\(model,? ?(?:\.\.\., )?", r"([\d.]+)"
OF_TORCH = r"(?:, from torch 2\.\d+ on forward_sync_buffers=False)?"
BFLOAT16, FLOAT16 = (
    rf"with torch\.autocast\('cuda', torch\.{dtype}\) around the forward pass and the loss"
    r"(?:, and torch\.amp\.GradScaler around the update)?"
    for dtype in ("bfloat16", "float16")
)
TRAINER = (
    (rf"{DDP}bucket_cap_mb={NUMBER}\)", r"TrainingArguments(ddp_bucket_cap_mb=\1)"),
    (
        rf"{DDP}(find_unused_parameters|broadcast_buffers)=False\){OF_TORCH}",
        r"TrainingArguments(ddp_\1=False)",
    ),
    (r"DistributedDataParallel\(model\)", "TrainingArguments()"),
    (
        rf"DataLoader\(\.\.\., num_workers={NUMBER}(?:, persistent_workers=True)?\)",
        r"TrainingArguments(dataloader_num_workers=\1, dataloader_persistent_workers=True)",
    ),
    (r"torch\.optim\.AdamW?\(\.\.\., fused=True\)", 'TrainingArguments(optim="adamw_torch_fused")'),
    (
        r"Call the layers without torch\.utils\.checkpoint, all or some of them",
        "TrainingArguments(gradient_checkpointing=False)",
    ),
    (
        r"Run all micro-batches but the last inside model\.no_sync\(\), forward pass included",
        "TrainingArguments(gradient_accumulation_steps=...), which does not exchange in between",
    ),
    (r"A batch per rank of (\d+)", r"TrainingArguments(per_device_train_batch_size=\1)"),
    (BFLOAT16, "TrainingArguments(bf16=True)"),
    (FLOAT16, "TrainingArguments(fp16=True)"),
    (
        r"Put samples of like length into one batch",
        "TrainingArguments(train_sampling_strategy='group_by_length'): texts of like length",
    ),
    (r"Write less often", "TrainingArguments(save_steps=...): write less often"),
    (r"or evaluate less often", "or evaluate less often, TrainingArguments(eval_steps=...)"),
    (r"^Log every so many steps", "TrainingArguments(logging_steps=...): log every so many steps"),
)
ACCELERATE = (
    (
        rf"{DDP}(bucket_cap_mb|find_unused_parameters|broadcast_buffers)=([\w.]+)\){OF_TORCH}",
        r"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(\1=\2)])",
    ),
    (r"DistributedDataParallel\(model\)", "accelerator.prepare(model)"),
    (
        r"Run all micro-batches but the last inside model\.no_sync\(\), forward pass included",
        "Accelerator(gradient_accumulation_steps=...) and `with accelerator.accumulate(model):` "
        "around each micro-batch",
    ),
    (BFLOAT16, "Accelerator(mixed_precision='bf16')"),
    (FLOAT16, "Accelerator(mixed_precision='fp16')"),
)
WORDS = {"Trainer": TRAINER, "accelerate": ACCELERATE}
"""What a change for a plain loop is called, by who calls the optimizer (``facts.csv``)."""


def in_its_words(case: Case, verdict: Verdict) -> Verdict:
    """Returns a verdict whose change names the arguments of the framework that trains."""
    facts = case.run.tables.get(FACTS)
    if facts is None or "framework" not in facts:
        return verdict
    change = verdict.change
    for pattern, words in WORDS.get(str(facts["framework"].iloc[0]), ()):
        change = re.sub(pattern, words, change)
    return replace(verdict, change=change)
