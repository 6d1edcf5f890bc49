"""The gain of each option of the training step: with it against without it, in one run.

All arms are measured in one process, in rounds whose order rotates, and compared within a round,
so that a machine that grows slower favours none. Their models stay in the host's memory side by
side (a compiled one would have to be compiled again in every round): 12 bytes per parameter and arm
with AdamW. Where that is too much, choose fewer arms. A GPU holds the arm that is visited; the
others rest on the host.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import pandas as pd
import torch
from torch import Tensor

from common.analysis.one_device.options import open_options, rates, ratios_text
from common.benchmarks.one_device.option_arms import AGAIN, BASELINE, Arm, plan_arms
from common.data.batches import BatchStream
from common.errors import UserError
from common.perfmodel.one_device.memory import estimated_states, predict_memory
from common.perfmodel.one_device.workload import Workload
from common.runtime.machine.memory_limit import available_memory_bytes, is_out_of_memory
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder, record_run, single_device
from common.runtime.records.run_directory import RunDirectory
from common.runtime.seeding import seed_everything
from common.settings import DeviceOptions, NonNegative, Positive, RoundOptions, Seed
from common.training.step import TrainingStep, time_steps

logger = logging.getLogger(__name__)

TIME_COLUMNS = ("arm", "round", "iteration", "tokens", "step_time_ms")
WARMUP_COLUMNS = ("arm", "round", "iteration", "step_time_ms")
PREPARATION = -1
"""The round in which arms are built and compiled."""
LONG_STEP_S = 1.0
"""Step on a CPU that needs no warm-up before it: what it finds in no cache is lost in it. bfloat16
takes thirty times as long as float32 on processors without instructions for it."""


@dataclass(frozen=True)
class OptionsBenchmark(RoundOptions, DeviceOptions, Workload):
    """Measure what each option of the training step buys: alone, together, and all but one.

    Flags from --model to --vocab-size are those of the baseline, by default the plainest step there
    is; an arm is the baseline with options turned on. Writes options-times.csv (raw, one row per
    measured step), options-warmup-times.csv (round -1 is the preparation, with compilation in its
    first step) and options-arms.csv. Settings may also come from --config FILE (a YAML file; flags
    win).
    """

    attention: str = "eager"
    """sdpa (PyTorch's fused attention) or eager (the score matrix is written out)."""
    arms: tuple[str, ...] = ()
    """Options to measure besides the baseline, such as sdpa all all-but-compile; by default all."""
    rounds: Annotated[int, Positive] = 6
    """Rounds, at least; each measures every option once."""
    num_steps: Annotated[int, Positive] = 3
    """Measured steps per visit."""
    warmup_steps: Annotated[int, NonNegative] = 1
    """Steps before the measured ones of a visit; none on a CPU whose step takes over a second."""
    seed: Annotated[int, Seed] = 42
    """Seed of the initial weights and of the random tokens."""
    output_dir: str = "outputs/assignment0"

    def baseline(self) -> Workload:
        """Returns the part of the settings that says what is computed."""
        return Workload.of(vars(self))


def main(settings: OptionsBenchmark) -> None:
    """Measures the arms and prints the table."""
    with single_device("options", settings.device) as worker:
        arms = plan_arms(settings.baseline(), worker.device, settings.arms)
        for reason in settings.without_effect(worker.device.type):
            logger.warning("without effect: %s", reason)
        check_memory([arm for arm in arms if not arm.reason], worker.device)
        with record_run(settings, "options", worker) as recorder, ExitStack() as stack:
            if any(arm.workload.compile for arm in arms):
                stack.enter_context(compiled_apart())
            table = measure(settings, arms, worker.device, recorder)
            recorder.run.write_table("options-arms.csv", table)
        # Only now the witness has judged the machine.
        run = open_options(recorder.run.path)
        print(ratios_text(run))
        print(f"Written to {recorder.run.path}")


def compiled_apart() -> object:
    """Returns a context in which every arm is compiled as if it were alone.

    torch.compile keeps what it compiled by function, and the arms share GPT2.forward: it would
    give up after eight, or compile the second vocabulary for any size.
    """
    import torch._dynamo

    return torch._dynamo.config.patch(
        recompile_limit=100, fail_on_recompile_limit_hit=True, automatic_dynamic_shapes=False
    )


def check_memory(arms: list[Arm], device: torch.device) -> None:
    """Raises UserError where memory is short: the host's for all arms, a GPU's for any of them."""
    kept = []
    for arm in arms:
        states = estimated_states(arm.workload)
        kept.append(states["parameters"] + states["optimizer states"])
    peaks = [predict_memory(arm.workload).peak_bytes for arm in arms]
    model = arms[0].workload.model
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory
        largest = max(peaks)
        if largest > has:
            raise UserError(
                f"arm {arms[peaks.index(largest)].name} of {model} takes {largest / 2**30:.1f} "
                f"GiB, and the GPU has {has / 2**30:.1f}; choose other --arms, or a smaller "
                "--model or --batch_size"
            )
    has, steps = available_memory_bytes(), [0]
    if device.type == "cpu":
        steps = [peak - states for peak, states in zip(peaks, kept, strict=True)]
    if sum(kept) + max(steps) > has:
        raise UserError(
            f"{len(arms)} arms of {model} keep {sum(kept) / 2**30:.1f} GiB on the host, a "
            f"step takes {max(steps) / 2**30:.1f} more, and there are {has / 2**30:.1f}; choose "
            "fewer --arms, or a smaller --model or --batch_size"
        )


def resting_place(device: torch.device) -> torch.device | None:
    """Returns the device on which idle arms rest: the CPU for a GPU's; None on the CPU itself."""
    return torch.device("cpu") if device.type == "cuda" else None


def measure(
    settings: OptionsBenchmark, arms: list[Arm], device: torch.device, recorder: Recorder
) -> pd.DataFrame:
    """Visits the arms in rotated rounds; returns the rows of options-arms.csv."""
    bench = Bench(settings, device, recorder.run)
    usable = visiting_order(tuple(arm for arm in arms if not arm.reason))
    progress = Progress(len(usable) * (1 + settings.rounds))
    for arm in usable:
        bench.visit(arm, PREPARATION)
        progress.step(f"build {arm.name}")
    rounds = recorder.rounds(
        usable,
        settings,
        stage="options",
        times=lambda: 1 / rates(pd.DataFrame(bench.rows)),
        progress=progress,
    )
    for round_, arm in rounds:
        bench.visit(arm, round_)
        progress.step(f"round {round_ + 1}, {arm.name}")
    return pd.DataFrame([bench.describe(arm) for arm in arms])


def visiting_order(arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
    """Returns the arms with the baseline's double half a round away from it.

    Side by side the two would differ by less than the baseline and an arm at the other end of the
    round do from the same drift, and the control would tell too little.
    """
    without_again = [arm for arm in arms if arm.name != AGAIN]
    again = [arm for arm in arms if arm.name == AGAIN]
    half = (len(without_again) + 1) // 2
    return (*without_again[:half], *again, *without_again[half:])


class Bench:
    """The arms that are alive, and what was measured of them."""

    def __init__(self, settings: OptionsBenchmark, device: torch.device, run: RunDirectory) -> None:
        self.settings = settings
        self.device = device
        self.rows: list[dict] = []
        self._times = run.stream("options-times.csv", TIME_COLUMNS)
        self._warmup_times = run.stream("options-warmup-times.csv", WARMUP_COLUMNS)
        self._steps: dict[str, TrainingStep] = {}
        self._wake: dict[str, Callable[[], None]] = {}
        self._dropped: dict[str, str] = {}
        self._first_step_s: dict[str, float] = {}
        self._warmup_steps: dict[str, int] = {}
        self._peak_bytes: dict[str, int] = {}
        seed_everything(settings.seed)
        vocabulary = settings.unpadded.vocab_size
        self._batches = {
            ahead: BatchStream(
                batch_size=settings.batch_size,
                seq_len=settings.seq_len,
                vocab_size=vocabulary,
                device=device,
                asynchronous=ahead,
            )
            for ahead in (False, True)
        }

    def visit(self, arm: Arm, round_: int) -> None:
        """Builds and compiles the arm in the round PREPARATION, measures it in the others.

        An arm for which memory runs out, or that does not compile, is dropped with its reason.
        """
        if arm.name in self._dropped:
            return
        try:
            if round_ == PREPARATION:
                self._prepare(arm)
            else:
                self._measure(arm, round_)
        except (RuntimeError, MemoryError, OSError) as error:
            self._dropped[arm.name] = _why_dropped(arm, error, round_, self.device)
        if arm.name in self._dropped:
            logger.warning("%s: %s", arm.name, self._dropped[arm.name])
            self._steps.pop(arm.name, None)
            self._wake.pop(arm.name, None)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def describe(self, arm: Arm) -> dict:
        """Returns the arm's row of options-arms.csv: its end, its first step, its GPU memory."""
        reason = arm.reason or self._dropped.get(arm.name, "")
        peak = self._peak_bytes.get(arm.name)
        return {
            "arm": arm.name,
            "measured": not reason,
            "reason": reason,
            "first_step_s": self._first_step_s.get(arm.name),
            "peak_allocated_mib": None if peak is None else peak / 2**20,
        }

    def _prepare(self, arm: Arm) -> None:
        step = TrainingStep(arm.workload, self.device, seed=self.settings.seed)
        times_s = self._run(step, arm, 1 + self.settings.warmup_steps)
        self._steps[arm.name] = step
        self._first_step_s[arm.name] = times_s[0]
        is_long = self.device.type == "cpu" and times_s[-1] > LONG_STEP_S
        self._warmup_steps[arm.name] = 0 if is_long else self.settings.warmup_steps
        self._write_warmup(arm, PREPARATION, times_s)
        self._rest(arm)

    def _rest(self, arm: Arm) -> None:
        host = resting_place(self.device)
        if host:
            self._wake[arm.name] = rest(self._steps[arm.name], host)

    def _measure(self, arm: Arm, round_: int) -> None:
        step = self._steps[arm.name]
        if arm.name in self._wake:
            self._wake.pop(arm.name)()
        self._write_warmup(arm, round_, self._run(step, arm, self._warmup_steps[arm.name]))
        allocated = self._allocated()
        times_s = self._run(step, arm, self.settings.num_steps)
        if self.device.type == "cuda":
            # The arm's own peak: what the steps took on top of what was allocated before them, and
            # the arm's states, which were among that.
            peak = torch.cuda.max_memory_allocated(self.device) - allocated + state_bytes(step)
            self._peak_bytes[arm.name] = max(peak, self._peak_bytes.get(arm.name, 0))
        rows = [
            (arm.name, round_, iteration, arm.workload.tokens_per_step, time_s * 1e3)
            for iteration, time_s in enumerate(times_s)
        ]
        samples = [dict(zip(TIME_COLUMNS, row, strict=True)) for row in rows]
        self._times.write(samples)
        self.rows += samples
        self._rest(arm)

    def _run(self, step: TrainingStep, arm: Arm, count: int) -> list[float]:
        return time_steps(step, self._batches[arm.workload.async_batches], count)

    def _allocated(self) -> int:
        """Returns the bytes allocated on the GPU now, and starts a new peak from there."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _write_warmup(self, arm: Arm, round_: int, times_s: list[float]) -> None:
        rows = [(arm.name, round_, at, time_s * 1e3) for at, time_s in enumerate(times_s)]
        self._warmup_times.write(dict(zip(WARMUP_COLUMNS, row, strict=True)) for row in rows)


def state_bytes(step: TrainingStep) -> int:
    """Returns the bytes of a step's states on its device, gradients left out."""
    return sum(tensor.nbytes for tensor in states_of(step) if tensor.device == step.device)


def _why_dropped(arm: Arm, error: Exception, round_: int, device: torch.device) -> str:
    """Returns the reason in one line; raises the error again where it is a bug.

    Raises UserError where memory runs out in the baseline, without which nothing can be compared.
    """
    if is_out_of_memory(error) and arm.name != BASELINE:
        beside = ", beside the models of the other arms" if device.type == "cpu" else ""
        return f"out of memory{beside}"
    if is_out_of_memory(error):
        raise UserError("out of memory in the baseline; choose a smaller --batch_size") from None
    if arm.workload.compile and round_ == PREPARATION:
        return f"does not compile: {(str(error).strip() or repr(error)).splitlines()[0]}"
    raise error


def rest(step: TrainingStep, device: torch.device) -> Callable[[], None]:
    """Moves the states that are on the step's device to ``device``, so that others have its memory.

    To be called between steps, when there are no gradients. Returns the function that brings
    them back. What was elsewhere (AdamW's step counters, on the host unless it is fused) stays.

    Parameters and optimizer states keep their identity, as ``nn.Module.to`` keeps it: only their
    data are replaced, so that compiled code, which looks at a parameter's shape, type and device,
    and the optimizer's own tables go on as before. Nothing here is timed; a warm-up follows.
    """
    moved = [tensor for tensor in states_of(step) if tensor.device == step.device]
    _move(moved, device)
    return lambda: _move(moved, step.device)


def states_of(step: TrainingStep) -> Iterator[Tensor]:
    """Yields parameters, buffers and optimizer states, each once; gradients left out."""
    yield from step.model.parameters()
    yield from step.model.buffers()
    for state in step.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _move(tensors: list[Tensor], device: torch.device) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(device, copy=True)
