"""A torchrun that starts its ranks at once: it does not import torch, which takes seconds.

For tests of what stands around torchrun. It starts each rank in a session of its own, ends the
others when one fails, and leaves with status 1, as torchrun does; it has none of its messages.
"""

from __future__ import annotations

from pathlib import Path

MODULE = """
import argparse, os, subprocess, sys, time

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--nproc-per-node", type=int)
parser.add_argument("--log-dir", default="host1")
parser.add_argument("--standalone", action="store_true")
parser.add_argument("-m", action="store_true")
for flag in ("nnodes", "local-addr", "tee"):
    parser.add_argument(f"--{flag}")
for flag in ("backend", "id", "endpoint", "conf"):
    parser.add_argument(f"--rdzv-{flag}")
parser.add_argument("program", nargs=argparse.REMAINDER)
own = parser.parse_args()

ranks, host = own.nproc_per_node, own.log_dir.rpartition("host")[2]
host = int(host) if host.isdigit() else 1  # ranks of this machine log anywhere
program = [sys.executable, "-u", *(["-m"] if own.m else []), *own.program]
processes = []
for local in range(ranks):
    place = {"LOCAL_RANK": local, "RANK": (host - 1) * ranks + local, "LOCAL_WORLD_SIZE": ranks}
    place["WORLD_SIZE"] = int(own.nnodes or 1) * ranks
    variables = os.environ | {name: str(value) for name, value in place.items()}
    processes.append(subprocess.Popen(program, env=variables, start_new_session=True))
while any(process.poll() is None for process in processes):
    if any(process.poll() for process in processes):
        for process in processes:
            process.terminate()
    time.sleep(0.02)
sys.exit(any(process.returncode for process in processes))
"""

REFUSE = """
from dataclasses import dataclass
from common.errors import UserError
from common.runtime.script import run_script

@dataclass(frozen=True)
class Settings:
    rounds: int = 1

def main(settings):
    raise UserError(f"rounds is {settings.rounds}; it must be above 0")

run_script(main, Settings)
"""
"""A script whose ranks refuse their settings."""


def write_quick_torchrun(folder: Path) -> dict[str, str]:
    """Writes it below the folder; returns the variables with which Python finds it, not torch's."""
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").touch()
    (package / "run.py").write_text(MODULE)
    return {"PYTHONPATH": str(folder)}
