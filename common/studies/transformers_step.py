"""``ddplab study transformers``: this project's training step beside transformers' own model.

Both sides have the same weights, batch, precision and optimizer, and no dropout; before anything is
timed their losses and gradients must agree. Pairings: plain eager execution with fused and with
written-out attention, compiled, 16-bit, and each side's best settings at either precision, which
are searched for first, one change at a time, in the same run (``candidate-times.csv``). A pairing's
result is the ratio of their time to ours in the same round (``step-times.csv``).

With best settings each side runs once more with freed memory kept (``common.runtime.kept_memory``).
That is a setting of the process, not of a model: this project offers it, transformers' users do
not get it by default, and both would gain. So three ratios are stated: without it, with it on our
side, and with it on both.
"""

from __future__ import annotations

import gc
import itertools
import resource
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from common.benchmarks.rounds import rotated_rounds
from common.errors import RunFailed
from common.models.gpt2 import GPT2
from common.perfmodel.one_device.workload import Workload
from common.report.progress import StageProgress
from common.runtime.device import choose_device
from common.runtime.kept_memory import kept_memory
from common.runtime.recorder import require_not_negative, require_positive
from common.runtime.run_directory import SampleStream
from common.runtime.seeding import seed_everything
from common.studies.study import study_run, with_verdicts
from common.training.loop import time_steps
from common.training.step import TrainingStep, build_model

OURS, THEIRS, KEPT = "ours", "transformers", ", memory kept"
BEST = "best, "
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative difference of losses and gradient norms that rounding explains."""
COLUMNS = ("pairing", "side", "round", "iteration", "step_time_ms", "page_faults")
PAIRINGS = {
    "eager mode, SDPA": {},
    "eager mode, attention written out": {"attention": "eager"},
    "compiled, SDPA": {"compile": True},
    "bfloat16, SDPA": {"precision": "bfloat16"},
    "bfloat16, compiled, SDPA": {"precision": "bfloat16", "compile": True},
}
"""Pairing → options of both sides, on top of float32 with a fused AdamW."""
CANDIDATES = {
    THEIRS: ({"attention": "eager"}, {"compile": True}),
    OURS: ({"attention": "eager"}, {"compile": True}, {"loss_chunks": 2}, {"loss_chunks": 4}),
}
"""Side → changes that are tried in this order; each is kept if it is faster."""


@dataclass(frozen=True)
class TransformersStudy:
    """Settings of the study: the step, its pairings, and how long they are measured."""

    model: str = "gpt2"
    batch_size: int = 2
    seq_len: int = 256
    rounds: int = 5
    steps: int = 1
    """Measured steps per visit."""
    warmup_steps: int = 1
    candidate_steps: int = 2
    pairings: tuple[str, ...] = tuple(PAIRINGS)
    best_of: tuple[str, ...] = ("float32", "bfloat16")
    """Precisions at which each side's best settings are compared."""
    vocab_multiple: int = 1
    """Pad the vocabulary of both sides to a multiple of this."""
    device: str | None = None
    """cpu or cuda; by default CUDA where it is."""

    def __post_init__(self) -> None:
        require_positive(self, "rounds", "steps", "candidate_steps")
        require_not_negative(self, "warmup_steps")
        self.workload()

    def torch_device(self) -> torch.device:
        """Returns the device; raises UserError for one that cannot be used."""
        return torch.device(choose_device(self.device))

    def workload(self, **options) -> Workload:
        """Returns the step in float32 with a fused AdamW, changed by ``options`` of a Workload."""
        return Workload(
            model=self.model,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            optimizer_implementation="fused",
            vocab_multiple=self.vocab_multiple,
            **options,
        )


def study_of_device() -> TransformersStudy:
    """Returns the study for this machine: on a GPU the step as nanoGPT trains it.

    That is batch 12, sequence 1,024 and a vocabulary of 50,304 (nanoGPT's train.py).
    """
    if choose_device() == "cpu":
        return TransformersStudy()
    return TransformersStudy(
        batch_size=12,
        seq_len=1024,
        vocab_multiple=64,
        rounds=8,
        steps=10,
        warmup_steps=3,
        pairings=("bfloat16, SDPA", "bfloat16, compiled, SDPA"),
        best_of=(),
    )


class TheirModel(nn.Module):
    """transformers' GPT2LMHeadModel with the signature of ours; it shifts the labels itself."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = workload.config
        config = GPT2Config(
            vocab_size=sizes.vocab_size,
            n_positions=sizes.n_positions,
            n_embd=sizes.n_embd,
            n_layer=sizes.n_layer,
            n_head=sizes.n_head,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,  # what generation needs would only slow training down
            attn_implementation=workload.attention,
        )
        seed_everything(42)
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss; ``targets`` must be those of ``shifted_batch``."""
        return self.model(input_ids=tokens, labels=tokens).loss


def run_study(study: TransformersStudy, output_dir: str, progress: StageProgress) -> Path:
    """Searches best settings, compares the sides and judges; returns the run directory.

    Raises:
        RunFailed: the two sides do not compute the same.
        UserError: a device that cannot be used.
    """
    how = {"device": study.torch_device().type, "backend": None, "ranks": 1}
    with study_run("transformers", study, output_dir, progress, **how) as run:
        pairs = {
            name: (study.workload(**PAIRINGS[name]), study.workload(**PAIRINGS[name]))
            for name in study.pairings
        }
        candidates = run.stream("candidate-times.csv", COLUMNS)
        for precision in study.best_of:
            with progress.stage(f"best settings, {precision}") as update:
                pairs[BEST + precision] = tuple(
                    best_workload(study, side, precision, candidates, update)
                    for side in (OURS, THEIRS)
                )
        times = run.stream("step-times.csv", COLUMNS)
        frames = []
        for name, (ours, theirs) in pairs.items():
            with progress.stage(name):
                frames.append(compare(study, name, ours, theirs, times))
        samples = pd.concat(frames)
        run.write_table("settings.csv", settings_table(pairs))
        verdicts = judge(samples)
        run.write_table("verdicts.csv", verdicts)
    progress.say(verdicts.to_string(index=False, float_format="%.3f"))
    return run.path


def build(side: str, workload: Workload, device: torch.device) -> TrainingStep:
    """Makes the training step of one side, with the weights of transformers' seeded model."""
    theirs = TheirModel(workload).to(device)
    if side == THEIRS:
        return TrainingStep(workload, device, model=theirs)
    ours = build_model(workload, device)
    ours.load_state_dict(GPT2.from_huggingface(theirs.model).state_dict())
    return TrainingStep(workload, device, model=ours)


def shifted_batch(study: TransformersStudy) -> tuple[Tensor, Tensor]:
    """Draws random tokens and returns them with their successors, both [batch, length].

    The last token has no successor (−100, which the loss ignores), as in transformers.
    """
    seed_everything(7)
    vocabulary = study.workload().config.vocab_size
    tokens = torch.randint(vocabulary, (study.batch_size, study.seq_len)).to(study.torch_device())
    return tokens, nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)


def check_agreement(
    ours: TrainingStep, theirs: TrainingStep, batch: tuple[Tensor, Tensor], tolerance: float
) -> None:
    """Raises RunFailed unless loss and norm of all gradients agree, relative to ``tolerance``."""
    found = {}
    for side, step in ((OURS, ours), (THEIRS, theirs)):
        loss = step.forward(*batch)
        loss.backward()
        norms = [parameter.grad.norm() for parameter in step.model.parameters()]
        found[side] = (loss.item(), torch.stack(norms).norm().item())
        step.optimizer.zero_grad()
    for what, one, other in zip(("losses", "gradient norms"), *found.values(), strict=True):
        if abs(one / other - 1) > tolerance:
            raise RunFailed(f"{what} differ, {one:.6g} and {other:.6g}: not the same computation")


def compare(
    study: TransformersStudy, name: str, ours: Workload, theirs: Workload, times: SampleStream
) -> pd.DataFrame:
    """Times both sides in rotated rounds; returns the measured samples."""
    torch._dynamo.reset()
    batch = shifted_batch(study)
    device = study.torch_device()
    steps = {OURS: build(OURS, ours, device), THEIRS: build(THEIRS, theirs, device)}
    check_agreement(steps[OURS], steps[THEIRS], batch, TOLERANCE[ours.precision])
    batches = itertools.repeat(batch)
    for step in steps.values():
        time_steps(step, batches, 1 + study.warmup_steps)
    # PyTorch always keeps freed memory on a GPU.
    keeps = name.startswith(BEST) and device.type == "cpu"
    arms = [OURS, THEIRS] + [OURS + KEPT, THEIRS + KEPT] * keeps
    rows = []
    for round_, arm in rotated_rounds(arms, study.rounds):
        step = steps[arm.removesuffix(KEPT)]
        with kept_memory() if arm.endswith(KEPT) else nullcontext():
            # At least one step first, which fills the memory that the others find mapped.
            time_steps(step, batches, max(1, study.warmup_steps))
            rows += _samples(study, name, arm, round_, step, batches, study.steps)
    times.write(rows)
    del steps, step
    gc.collect()
    return pd.DataFrame(rows)


def best_workload(
    study: TransformersStudy,
    side: str,
    precision: str,
    candidates: SampleStream,
    update: Callable[[str], None],
) -> Workload:
    """Searches the fastest settings of a side: tries one change after another, keeps the faster."""
    best = study.workload(precision=precision)
    best_ms = _candidate_ms(study, side, f"{precision}, plain", best, candidates)
    for change in CANDIDATES[side]:
        tried = replace(best, **change)
        name = ", ".join(f"{key} {value}" for key, value in change.items())
        update(f"{side}: {name}")
        time_ms = _candidate_ms(study, side, f"{precision}, {name}", tried, candidates)
        if time_ms < best_ms:
            best, best_ms = tried, time_ms
    return best


def _candidate_ms(
    study: TransformersStudy, side: str, name: str, workload: Workload, candidates: SampleStream
) -> float:
    torch._dynamo.reset()
    step = build(side, workload, study.torch_device())
    batches = itertools.repeat(shifted_batch(study))
    time_steps(step, batches, 1 + study.warmup_steps)
    rows = _samples(study, name, side, 0, step, batches, study.candidate_steps)
    candidates.write(rows)
    del step
    gc.collect()
    return pd.DataFrame(rows)["step_time_ms"].median()


def _samples(
    study: TransformersStudy,
    name: str,
    side: str,
    round_: int,
    step: TrainingStep,
    batches: Iterable,
    count: int,
) -> list[dict]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    times_s = time_steps(step, batches, count)
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / count
    return [
        dict(zip(COLUMNS, (name, side, round_, index, time_s * 1e3, faults), strict=True))
        for index, time_s in enumerate(times_s)
    ]


def settings_table(pairs: dict[str, tuple[Workload, Workload]]) -> pd.DataFrame:
    """Returns a row per pairing and side, with the options that differ from the defaults."""
    names = [field.name for field in fields(Workload)]
    rows = []
    for pairing, sides in pairs.items():
        for side, workload in zip((OURS, THEIRS), sides, strict=True):
            changed = [n for n in names if getattr(workload, n) != getattr(Workload(), n)]
            told = ", ".join(f"{n} {getattr(workload, n)}" for n in changed)
            rows.append({"pairing": pairing, "side": side, "settings": told})
    return pd.DataFrame(rows)


def judge(samples: pd.DataFrame) -> pd.DataFrame:
    """Computes transformers' time over ours in each round; returns a row per pairing.

    Columns: promise, at_least, found (median over rounds), lowest, highest and held.
    """
    rounds = samples.groupby(["pairing", "round", "side"], sort=False)["step_time_ms"].median()
    wide = rounds.unstack("side")
    sides = {"": (OURS, THEIRS)}
    if OURS + KEPT in wide:
        sides |= {
            ", ours keeping memory": (OURS + KEPT, THEIRS),
            ", both keeping memory": (OURS + KEPT, THEIRS + KEPT),
        }
    rows = []
    for pairing, times in wide.groupby("pairing", sort=False):
        for how, (ours, theirs) in sides.items():
            ratio = (times[theirs] / times[ours]).dropna()
            if ratio.empty:
                continue
            aim = 1.2 if pairing.startswith(BEST) else 1.0
            found = ratio.median()
            spread = {"lowest": ratio.min(), "highest": ratio.max()}
            promise = f"their time over ours: {pairing}{how}"
            rows.append({"promise": promise, "at_least": aim, "found": found} | spread)
    return with_verdicts(pd.DataFrame(rows))
