"""A rank of a sweep that is far too long to end by itself: ``broken_sweep_worker.py FOLDER``.

It sends itself the signal BREAK_SIGNAL when FOLDER/run has some samples, if it is BREAK_RANK.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from common.benchmarks.buckets.allreduce import AllReduceBenchmark, main
from common.runtime.script import run_script

ROWS = 8
FLAGS = ("--numel", "1", "1000", "--rounds", "100000", "--iterations", "2", "--device", "cpu")


def break_off(table: Path) -> None:
    """Waits for the rows, and sends the signal."""
    while not table.exists() or table.read_bytes().count(b"\n") <= ROWS:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.Signals[os.environ["BREAK_SIGNAL"]])


if __name__ == "__main__":
    folder = sys.argv[1]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
    if os.environ["RANK"] == os.environ["BREAK_RANK"]:
        table = Path(folder) / "run" / "allreduce-samples.csv.partial"
        threading.Thread(target=break_off, args=(table,), daemon=True).start()
    where = ("--output_dir", folder, "--run_id", "run")
    run_script(main, AllReduceBenchmark, arguments=(*FLAGS, *where))
