"""What DDP adds to a backward pass besides waiting: its bookkeeping, and contention.

Arms in rotated rounds, all ranks at the same time, none of them a bucketing that predictions are
judged on:

- ``local``: the backward pass alone.
- ``bookkeeping``: DDP over a group of one rank: gradients are copied into a bucket, divided and
  copied back, and nothing is sent.
- ``paced``: the backward pass with all-reduces of one size launched now and then, each done before
  the next: what they take from computation is what they add to the backward pass.
- ``continuous``: the backward pass beside all-reduces without pause, more of them than it lasts,
  with how many were done when it ended; and ``all_reduce``, the same all-reduces alone. Where the
  largest message asked for is done too soon (8 MiB over NVLink: in 0.1 ms), a larger one is taken:
  Python launches few large ones faster than they are done, and many small ones more slowly.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.benchmarks.allreduce import rotated
from common.benchmarks.gpt2_step import StepSettings
from common.benchmarks.lasting_messages import LastingMessages
from common.benchmarks.replay_step import Step, make_step
from common.errors import UserError
from common.runtime.collective_timing import start_together, time_in_flight, time_sequence
from common.runtime.own_group import own_group
from common.runtime.process_group import Worker, process_group
from common.runtime.progress import Progress
from common.runtime.recorder import Recorder, record_run, require_not_negative, require_positive
from common.runtime.timing import clock_for

COLUMNS = (
    *("arm", "message_bytes", "messages", "round", "iteration", "rank"),
    *("backward_time_ms", "all_reduce_time_ms", "messages_done", "gradient_bytes"),
)
"""``messages_done``: how many all-reduces ended during the backward pass."""
BUFFER_BYTES = 2**30
"""For the messages beside a pass; or as much as the gradients take, if that is more."""
BACKWARD_LAUNCHES = 100
"""Of the backward pass, launched while the device is held back with the all-reduces."""


@dataclass(frozen=True)
class OverlapBenchmark:
    """Measure DDP's bookkeeping, and how backward pass and all-reduce slow each other down.

    Recipe: uv run torchrun --nproc_per_node=2 assignments/assignment2/overlap_benchmark.py
    --model gpt2-nano --max_seq_len 64. Writes overlap-times.csv (raw).
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    model: str = "gpt2-large"
    """gpt2-nano, gpt2, gpt2-medium, gpt2-large or gpt2-xl."""
    batch_size: int = 4
    max_seq_len: int = 1024
    dtype: str = "float32"
    replay: str = ""
    """Instead of training a model, sleep as this recorded backward pass computed: a system below
    data/, a run directory or a gradient-ready-times.csv. Model, batch, sequence, dtype and
    seed then mean nothing."""
    replay_factor: float = 1.0
    """Divide the recording's sizes by this; links as much slower then give the same picture."""
    replay_time_factor: float = 1.0
    """Divide the recording's times by this."""
    message_mib: tuple[float, ...] = (0.001, 0.0625, 0.25, 1, 4, 8)
    """Sizes of the all-reduces beside the backward pass, in MiB."""
    rounds: int = 4
    num_steps: int = 4
    """Measured backward passes per arm and round."""
    warmup_steps: int = 2
    backend: str | None = None
    """nccl or gloo; by default NCCL on CUDA and gloo on the CPU."""
    device: str | None = None
    seed: int = 42
    output_dir: str = "outputs/assignment2"
    run_id: str = ""
    """Name of the run directory below output_dir; made up by default."""

    def __post_init__(self) -> None:
        require_not_negative(self, "warmup_steps")
        require_positive(self, "rounds", "num_steps")
        if not self.message_mib:
            raise UserError("message_mib is empty; give at least one size")
        for size in self.message_mib:
            if not 1 / 2**20 <= size < float("inf"):
                raise UserError(f"message_mib {size}: a message has at least one byte, and an end")
        self.step_settings()

    def step_settings(self) -> StepSettings:
        """The part of the settings that says what is trained."""
        return StepSettings(
            *(self.model, self.batch_size, self.max_seq_len, self.dtype),
            seed=self.seed,
            replay=self.replay,
            replay_factor=self.replay_factor,
            replay_time_factor=self.replay_time_factor,
        )


@dataclass(frozen=True)
class Arm:
    """One condition: ``messages`` all-reduces of ``size_bytes`` beside the backward pass."""

    kind: str
    size_bytes: int = 0
    messages: int = 0


def main(settings: OverlapBenchmark) -> None:
    """Run the benchmark and print the medians."""
    with process_group(settings.device, settings.backend) as worker:
        step = make_step(settings.step_settings(), worker)
        with record_run(
            *(settings, "overlap_benchmark", worker),
            recorded_settings=step.recorded_settings,
            notes=(step.note,),
        ) as recorder:
            samples = measure(settings, step, worker, recorder)
            if recorder.run:
                keys = ["arm", "message_bytes", "messages"]
                times = ["backward_time_ms", "all_reduce_time_ms"]
                slowest = samples.groupby([*keys, "round", "iteration"], sort=False)[times].max()
                medians = slowest.groupby(keys, sort=False).median().reset_index()
                print(medians.to_string(index=False, float_format="%.4g"))
                print(f"Written to {recorder.run.path}")


def measure(
    settings: OverlapBenchmark, step: Step, worker: Worker, recorder: Recorder
) -> pd.DataFrame:
    """Visit the arms in rotated rounds; the samples of all ranks, on rank 0."""
    stream = recorder.stream("overlap-times.csv", COLUMNS)
    lab = OverlapLab(step, worker)
    arms = lab.plan([int(size * 2**20) for size in settings.message_mib])
    progress = Progress(settings.rounds * len(arms), worker.is_main)
    for round_ in range(settings.rounds):
        for arm in rotated(arms, round_):
            # DDP forms its buckets in its first steps: they are warm-up whatever was asked.
            warmup = max(3, settings.warmup_steps) if model_is_new(arm) else settings.warmup_steps
            passes = lab.run(arm, warmup + settings.num_steps)[warmup:]
            stream.write(lab.rows(arm, round_, passes))
            progress.step(f"round {round_ + 1}, {arm.kind}")
    return stream.table()


def model_is_new(arm: Arm) -> bool:
    """Whether each visit to the arm makes a DDP instance."""
    return arm.kind == "bookkeeping"


@dataclass(frozen=True)
class OverlappedPass:
    """Seconds of one backward pass, and from its start to the last all-reduce's end.

    ``done``: all-reduces that ended during the backward pass.
    """

    backward_s: float
    all_reduce_s: float
    done: int = 0


class OverlapLab:
    """One model's backward pass, to be run beside all-reduces of any size."""

    def __init__(self, step: Step, worker: Worker) -> None:
        self.step = step
        self.worker = worker
        self.clock = clock_for(worker.device)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in step.model.parameters())
        self.one_rank_group = own_group(worker)
        self.messages = LastingMessages(worker, max(BUFFER_BYTES, self.gradient_bytes))
        self.ready_order, self.backward_s = self._watch_backward()

    def plan(
        self, sizes_bytes: Sequence[int], continuous_bytes: Sequence[int] = ()
    ) -> tuple[Arm, ...]:
        """The arms: as many paced messages as fit in the backward pass without queueing.

        Paced ones take up a third of it at most; continuous ones take twice as long alone, so that
        they outlast it. By default they are of the largest size, or of a larger one where that
        takes too many (``LastingMessages.few_lasting``).
        """
        arms = [Arm("local"), Arm("bookkeeping")]
        most = min(12, len(self.ready_order))  # each is launched as another gradient comes
        for size in sizes_bytes:
            buffers = self.messages.make(size, 1) * 6
            once = self._agree(min(time_sequence(buffers, self.worker)[2:]))
            paced = min(most, max(2, int(self.backward_s / 3 / once)))
            arms.append(Arm("paced", size, paced))
        if continuous_bytes:
            continuous = [
                (size, self.messages.lasting(size, 2 * self.backward_s)[0])
                for size in continuous_bytes
            ]
        else:
            continuous = [self.messages.few_lasting(max(sizes_bytes), 2 * self.backward_s)]
        for size, count in continuous:
            arms += [Arm("continuous", size, count), Arm("all_reduce", size, count)]
        return tuple(arms)

    def rows(self, arm: Arm, round_: int, passes: Sequence[OverlappedPass]) -> list[dict]:
        """This rank's rows of overlap-times.csv, but for the rank."""
        keys = {"arm": arm.kind, "message_bytes": arm.size_bytes, "messages": arm.messages}
        keys |= {"round": round_, "gradient_bytes": self.gradient_bytes}
        return [
            keys
            | {
                "iteration": iteration,
                "backward_time_ms": one.backward_s * 1e3,
                "all_reduce_time_ms": one.all_reduce_s * 1e3,
                "messages_done": one.done,
            }
            for iteration, one in enumerate(passes)
        ]

    def run(self, arm: Arm, count: int) -> list[OverlappedPass]:
        """``count`` backward passes under the arm's condition."""
        messages = self.messages.make(arm.size_bytes, arm.messages)
        if arm.kind == "all_reduce":
            return [
                OverlappedPass(0.0, time_in_flight(messages, self.worker), arm.messages)
                for _ in range(count)
            ]
        if arm.kind == "bookkeeping":
            model = self._bookkeeping_model()
            times_s = [self._timed_backward(model, []) for _ in range(count)]
            del model
            gc.collect()  # DDP's hooks go with it
            return times_s
        if arm.kind == "paced":
            return [self._timed_backward(None, [], messages) for _ in range(count)]
        return [self._timed_backward(None, messages) for _ in range(count)]

    def _timed_backward(
        self,
        model: torch.nn.Module | None,
        at_start: Sequence[Tensor],
        paced: Sequence[Tensor] = (),
    ) -> OverlappedPass:
        """A backward pass with all-reduces ``at_start``, and ``paced`` ones on its way."""
        works: list[dist.Work] = []

        def launch(message: Tensor) -> None:
            works.append(dist.all_reduce(message, async_op=True))

        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, message=message: launch(message))
            for parameter, message in zip(self._spread(len(paced)), paced, strict=True)
        ]
        self.step.zero_grad()
        loss = self.step.forward(model)
        start_together(self.worker, self.clock, len(at_start) + BACKWARD_LAUNCHES)
        start = self.clock.mark()
        for message in at_start:
            launch(message)
        before = sum(work.is_completed() for work in works)
        backward_start = self.clock.mark()
        loss.backward()
        backward_end = self.clock.mark()
        if self.worker.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the host is ahead of the backward pass
        done = sum(work.is_completed() for work in works) - before
        for work in works:
            work.wait()
        end = self.clock.mark()
        self.clock.wait()
        for hook in hooks:
            hook.remove()
        elapsed = self.clock.elapsed_s
        return OverlappedPass(elapsed(backward_start, backward_end), elapsed(start, end), done)

    def _watch_backward(self) -> tuple[list[tuple[torch.nn.Parameter, float]], float]:
        """Parameters with the share of the backward pass at which each is ready; its seconds."""
        marks: dict = {}
        hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda p: marks.__setitem__(p, self.clock.mark())
            )
            for parameter in self.step.model.parameters()
        ]
        for _ in range(10):  # also warms up
            start = self.clock.mark()
            backward_s = self._timed_backward(None, []).backward_s
        for hook in hooks:
            hook.remove()
        ready = {parameter: self.clock.elapsed_s(start, mark) for parameter, mark in marks.items()}
        last = max(ready.values())
        first = last - backward_s
        order = sorted(ready.items(), key=lambda item: item[1])
        return [(p, (at - first) / backward_s) for p, at in order], self._agree(backward_s)

    def _spread(self, count: int) -> list[torch.nn.Parameter]:
        """Parameters that become ready evenly over the first four fifths of the backward pass."""
        chosen = []
        for k in range(count):
            share = 0.8 * (k + 0.5) / count
            left = [item for item in self.ready_order if item[0] not in set(chosen)]
            chosen.append(min(left, key=lambda item: abs(item[1] - share))[0])
        return chosen

    def _bookkeeping_model(self) -> DistributedDataParallel:
        """DDP over this rank alone, all gradients in one bucket."""
        device = self.worker.device
        return DistributedDataParallel(
            self.step.model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=self.one_rank_group,
            bucket_cap_mb=2**20,
        )

    def _agree(self, value: float) -> float:
        return max(self.worker.gather(value))
