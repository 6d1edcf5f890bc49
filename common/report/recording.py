"""Keeps a run under ``data/<machine>/`` for others: its tables, settings and environment.

Facts of one machine or user are left out: host name, process id, serial numbers of GPUs, paths.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import yaml

from common.errors import UserError, naming_os_errors
from common.runtime.flags import read_yaml
from common.runtime.paths import project_root
from common.runtime.records.run_directory import read_environment, write_atomically, written_beside

PRIVATE = ("host", "host_names", "process", "launched_by", "slurm_job_id")
SHARED_VARIABLES = ("NCCL_", "OMP_", "GLOO_", "MKL_", "PYTORCH_", "CUDA_VISIBLE", "SLURM_NNODES")
LIMIT_MIB = 6
"""Largest size of a recorded run's tables; git keeps them in a fifth of that."""


def keep_run(run_dir: Path, machine: str, assignment: str, folder: Path | None = None) -> Path:
    """Copies the complete run's tables to ``data/<machine>/<assignment>``, replacing what is there.

    Raises UserError for a run that is not complete, a name that is no folder's, tables above
    ``LIMIT_MIB`` in all, or a file that cannot be read or written.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", machine):
        raise UserError(f"machine {machine!r}: lower-case letters, digits and '-', like h100-8")
    parts = assignment.split("/")
    if not all(re.fullmatch(r"[a-z0-9][a-z0-9-]*", part) for part in parts):
        raise UserError(
            f"assignment {assignment!r}: lower-case letters, digits and '-', like study-accuracy"
        )
    if not (run_dir / "environment.json").is_file():
        raise UserError(f"{run_dir}: not a run directory (no environment.json)")
    status = read_environment(run_dir)["status"]
    if status != "complete":
        raise UserError(f"{run_dir}: its status is {status}; only a complete run is recorded")
    tables = sorted(run_dir.glob("**/*.csv"))
    size_mib = sum(table.stat().st_size for table in tables) / 2**20
    if size_mib > LIMIT_MIB:
        raise UserError(
            f"{run_dir}: {size_mib:.1f} MiB of tables; at most {LIMIT_MIB} are recorded"
        )
    target = (folder or project_root() / "data") / machine / assignment
    with written_beside(target) as beside:
        beside.mkdir(parents=True)
        for table in tables:
            copy = beside / table.relative_to(run_dir)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with naming_os_errors(table):
                shutil.copyfile(table, copy)
        for record in run_dir.glob("**/environment.json"):
            copy = beside / record.parent.relative_to(run_dir)
            is_run = (record.parent / "config.yaml").is_file()  # a watch's record has none
            if copy.is_dir() and (is_run or record.parent == run_dir):
                _copy_description(record.parent, copy)
        shutil.rmtree(target, ignore_errors=True)
    return target


def _copy_description(source: Path, target: Path) -> None:
    environment = json.loads((source / "environment.json").read_text())
    for key in PRIVATE:
        environment.pop(key, None)
    for gpu in environment.get("gpus", ()):
        for key in ("uuid", "bus_id"):
            gpu.pop(key, None)
    paths = r" --(output[_-]dir|run[_-]id|\S+?[ =](?=/)) ?\S+"  # they only say where files were
    environment["command"] = re.sub(paths, "", environment.get("command", ""))
    environment["variables"] = {
        key: value
        for key, value in environment.get("variables", {}).items()
        if key.startswith(SHARED_VARIABLES) and "/" not in value
    }
    write_atomically(target / "environment.json", json.dumps(environment, indent=1))
    kept = {
        key: value
        for key, value in read_yaml(source / "config.yaml").items()
        if key not in ("output_dir", "run_id") and not os.path.isabs(str(value))
    }
    write_atomically(target / "config.yaml", yaml.safe_dump(kept, sort_keys=False))
