"""TraceML in the processes of a study: its aggregator, and its tracing for a while.

TraceML is a tool beside ours, and a development dependency: import this where it is installed.
A script that calls it is traced to its end. A study that compares steps with and without it needs
an end before that: ``ForAWhile`` stops its threads, takes its patches off, and lets its aggregator
stand still.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import traceml_ai as traceml
from torch import nn
from torch.utils.data import DataLoader
from traceml_ai.instrumentation.hooks.optimizer_hooks import reset_optimizer_timing
from traceml_ai.runtime.lifecycle import start_runtime, wait_for_aggregator
from traceml_ai.runtime.settings import AggregatorTransportSettings, TraceMLSettings

from common.errors import RunFailed
from common.runtime.orphans import ending_with_parent
from common.runtime.process_group import Worker
from common.runtime.ranks import free_port

RUN = "traceml"
LONGEST_S = 90
"""The aggregator waits up to 60 s for what ranks have not sent yet."""
PATCHED = (
    (nn.Module, "__call__"),
    (DataLoader, "__iter__"),
    (torch.Tensor, "backward"),
    (torch.Tensor, "to"),
    (torch.autograd, "backward"),
)
"""What ``traceml.init`` replaces in its mode ``auto``."""


class Aggregator:
    """TraceML's aggregator (``traceml serve``), a process that ends with this one.

    Its summary is ``LOGS/traceml/final_summary.json`` after ``end``.
    """

    def __init__(self, logs: str, ranks: int, port: int) -> None:
        flags = ["--mode", "summary", "--logs-dir", logs, "--run-name", RUN]
        flags += ["--nnodes", "1", "--nproc-per-node", str(ranks)]
        flags += ["--aggregator-bind-host", "0.0.0.0", "--aggregator-port", str(port)]
        serve = [sys.executable, "-m", "traceml_ai.launcher.cli", "serve", *flags]
        self.process = subprocess.Popen(ending_with_parent(serve), stdout=subprocess.DEVNULL)

    def pause(self) -> None:
        """Lets the aggregator stand still; connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends a pause."""
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Ends the aggregator, after its summary is written."""
        self.process.terminate()
        self.process.wait(LONGEST_S)

    def kill(self) -> None:
        """Ends the aggregator without a summary, which takes minutes after many steps."""
        self.process.kill()
        self.process.wait()


class ForAWhile:
    """Traces steps with TraceML while a block runs, and leaves nothing running between blocks.

    All ranks make it, and enter its blocks, together. ``close`` ends the aggregator.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.at_end = ExitStack()
        logs = self.at_end.enter_context(tempfile.TemporaryDirectory())
        port = worker.broadcast(free_port() if worker.is_main else None)
        self.settings = TraceMLSettings(
            logs_dir=logs,
            session_id=RUN,
            aggregator=AggregatorTransportSettings(port=port),
            expected_world_size=worker.world_size,
        )
        self.patches: list[Callable] = []
        self.aggregator: Aggregator | None = None
        if worker.is_main:
            self.aggregator = Aggregator(logs, worker.world_size, port)
            self.at_end.callback(self.aggregator.kill)
        if not wait_for_aggregator("127.0.0.1", port, timeout_sec=LONGEST_S):
            raise RunFailed(f"TraceML's aggregator did not start in {LONGEST_S} s")
        worker.barrier()
        if self.aggregator:
            self.aggregator.pause()

    @contextmanager
    def tracing(self) -> Iterator[Callable[[nn.Module], AbstractContextManager]]:
        """Traces what stands in a block; yields TraceML's context for a step of a model."""
        plain = _functions()
        if self.aggregator:
            self.aggregator.go_on()
        runtime = start_runtime(self.settings, fail_open=False)
        _replace(self.patches or plain)
        traceml.init(on_missing_aggregator="raise")  # patches, the first time
        self.patches = _functions()
        try:
            yield traceml.trace_step
        finally:
            runtime.stop()
            reset_optimizer_timing()
            _replace(plain)
            self.worker.barrier()
            if self.aggregator:
                self.aggregator.pause()

    def close(self) -> None:
        """Ends the aggregator and removes what it wrote."""
        self.at_end.close()


def _functions() -> list[Callable]:
    """Returns the functions that stand at ``PATCHED``."""
    return [getattr(owner, name) for owner, name in PATCHED]


def _replace(functions: list[Callable]) -> None:
    """Puts functions at ``PATCHED``."""
    for (owner, name), function in zip(PATCHED, functions, strict=True):
        setattr(owner, name, function)
