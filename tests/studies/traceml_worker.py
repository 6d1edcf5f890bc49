"""One rank that TraceML follows in two blocks: says what it traced and what it left."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader
from traceml_ai.sdk.instrumentation import TraceState

from common.runtime.process_group import process_group
from common.studies.traceml import PATCHED, ForAWhile


def main() -> None:
    """Traces three steps twice, and compares what is patched and what runs before and after."""
    with process_group("cpu") as worker:
        model = nn.Linear(4, 4)
        optimizer = SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.ones(3, 4))
        tool = ForAWhile(worker)
        before, threads = state(), threading.active_count()
        counts = []
        for _ in range(2):
            earlier = TraceState.step
            with tool.tracing() as traced:
                assert before[:-1] != state()[:-1]
                for batch in loader:
                    with traced(model):
                        model(batch).sum().backward()
                        optimizer.step()
            counts.append(TraceState.step - earlier)
        left = before != state() or threads != threading.active_count()
        tool.close()
        print("traced: {}, then {}".format(*counts))
        print(f"left: {'something' if left else 'nothing'}")


def state() -> list[object]:
    """Returns what TraceML patches, and the number of global hooks of optimizers."""
    functions = [getattr(owner, name) for owner, name in PATCHED]
    return [*functions, len(_global_optimizer_post_hooks)]


if __name__ == "__main__":
    main()
