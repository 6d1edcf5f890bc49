"""Runs a script under TraceML on the ranks of a job: ``traceml_ranks.py LOGS SCRIPT [ARGUMENT …]``

TraceML is a tool beside ours, and a development dependency. It times a step that stands inside a
context manager of its own. Scripts of the study are left as they are, so the context is opened from
outside where TraceML's own documents put it: after a batch was fetched, until the update. A first
step is not traced, since the model is known only by the first update. Rank 0 runs TraceML's
aggregator (``traceml serve``), whose summary is ``LOGS/traceml/final_summary.json`` when the ranks
have ended.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import traceml_ai as traceml
from ddplab_watch.hooks import roots_of
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from common.runtime.processes.orphans import ending_with_parent

RUN = "traceml"
LONGEST_S = 90
"""The aggregator waits up to 60 s for what ranks have not sent yet."""
PORT = 29_765
"""Port of the aggregator on the first host, where nothing else of a study listens."""


def aggregate(logs: str, ranks: str) -> None:
    """Starts TraceML's aggregator, which writes its summary and ends as this process does."""
    flags = ["--mode", "summary", "--logs-dir", logs, "--run-name", RUN]
    flags += ["--nnodes", "1", "--nproc-per-node", ranks]
    flags += ["--aggregator-bind-host", "0.0.0.0", "--aggregator-port", str(PORT)]
    serve = [sys.executable, "-m", "traceml_ai.launcher.cli", "serve", *flags]
    process = subprocess.Popen(ending_with_parent(serve), stdout=subprocess.DEVNULL)
    # Both are called in the opposite order, and after TraceML's own end, registered later.
    atexit.register(process.wait, LONGEST_S)
    atexit.register(process.terminate)


class Steps:
    """Opens TraceML's context for each step of a loop that knows nothing of it."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.open: ExitStack | None = None
        self.handle = register_optimizer_step_post_hook(self.updated)

    def fetched(self) -> None:
        """Begins a step, unless it has begun with an earlier micro-batch."""
        if self.model is None or self.open is not None:
            return
        self.open = ExitStack()
        self.open.enter_context(traceml.trace_step(self.model))
        # TraceML notes the end of an update by such a hook, too; the step ends after it.
        self.handle.remove()
        self.handle = register_optimizer_step_post_hook(self.updated)

    def updated(self, optimizer: Optimizer, *_: Any) -> None:
        """Ends a step."""
        if self.model is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.model = roots_of(parameters)[0]
        self.close()

    def close(self) -> None:
        """Ends the step that is open, if there is one."""
        opened, self.open = self.open, None
        if opened is not None:
            opened.close()


def main() -> None:
    """Runs the script that is named."""
    logs, *program = sys.argv[1:]
    if int(os.environ["RANK"]) == 0:
        aggregate(logs, os.environ["WORLD_SIZE"])
    host = os.environ["MASTER_ADDR"]
    traceml.init(
        session_id=RUN,
        logs_dir=logs,
        ui_mode="summary",
        aggregator_host=host,
        aggregator_port=PORT,
        connect_timeout_sec=LONGEST_S,
        on_missing_aggregator="raise",
    )
    steps = Steps()
    fetching = DataLoader.__iter__

    def counted(loader: DataLoader) -> Iterator[Any]:
        for batch in fetching(loader):
            steps.fetched()
            yield batch

    DataLoader.__iter__ = counted
    sys.argv = program
    atexit.register(steps.close)
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
