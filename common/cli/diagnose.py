"""``ddplab diagnose``: why anybody's training is slow, and what each change would gain."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from common.cli.flags import check_output, refuse_given, write_output
from common.errors import UserError, naming_os_errors

if TYPE_CHECKING:
    from common.diagnose.opened import Opened

FLAGS_WITHOUT_VALUE = ("to_end", "no_probe", "verify", "anonymise", "compare", "track")
OF_READ = ("read", "traces", "hardware", "program")
OF_COMPARE = ("compare", "fail_above", "json", "track", "baseline", "program")
OF_FOLDER = ("baseline", "program")
"""Fields that have an effect where a job's files are read, two folders compared, one opened."""


@dataclass(frozen=True)
class Diagnose:
    """Find out why a training is slow: ddplab diagnose --nproc 2 train.py --lr 0.1

    Runs a script as it is, on ranks of this machine, watches some of its steps, and says what they
    lose time to, how sure that is, what to change, and the speedup to expect. The script really
    runs: what it writes is written. Given a folder that ddplab-watch wrote elsewhere (or that
    folder as .tar.gz), or a run directory of assignment 4, it diagnoses that. The results are
    printed and written beside the tables: diagnosis.json, diagnosis.html.
    """

    program: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """SCRIPT [ARGUMENT …], -m MODULE [ARGUMENT …], or a folder; flags of ddplab come before it."""
    nproc: int = 1
    """Ranks to start here, by torchrun; 1 starts the script by itself."""
    bundle: str = ""
    """Folder to write the bundle to (everything the watch records); by default one below
    outputs/watch."""
    warmup: int = 5
    """Steps before the first one that is timed."""
    window: int = 30
    """Steps that are timed as they are: the window."""
    bucket_steps: int = 10
    """Steps after the window in which gradients and buckets are timed, too."""
    profile_steps: int = 3
    """Steps after that which torch.profiler records, of a model under FSDP or compiled in place."""
    to_end: bool = False
    """After that, follow medians of steps to the end of the script; say when, on which rank and in
    which phase they change; judge the causes anew after a change."""
    no_probe: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not time passes and all-reduces alone after the window; gains are then not predicted."""
    verify: bool = False
    """Try changes for a few passes each, on a copy of the model: buckets, compression,
    accumulation, threads, cores."""
    anonymise: bool = False
    """Hash names of hosts, users and paths."""
    baseline: str = ""
    """Bundle or run directory of the same training on one rank, to compare with; by default that of
    the run itself, or what is predicted from its passes."""
    compare: bool = False
    """Compare two folders, before and after: step, phases and causes. Each is a bundle, a run
    directory, or a folder of bundles, one of each run."""
    fail_above: float | None = None
    """With --compare: exit with status 1 where the slowdown's whole interval exceeds so many per
    cent, with 3 where that is not settled, with 0 where it stays below; bad input is 2."""
    json: str = ""
    """With --compare: file to write the numbers to."""
    track: bool = False
    """With --compare: send the numbers to wandb, mlflow or TensorBoard, whichever is installed."""
    read: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Diagnose what a job has left, and run nothing: files, folders, or - for what is piped in, in
    any mixture. Read are what ranks and torchrun print, logs of NCCL and DDP, profiler traces,
    flight recorders' dumps, nvidia-smi (topo -m, -q, dmon), py-spy's dumps, tables of HTA and
    TraceLens, and what nccl-tests, all_reduce_bench.py and NCCL Inspector print: each row beside
    what its hardware should give."""
    hardware: str = ""
    """With --read: cluster that tables of collectives are from, where they do not tell: a name of
    data/clusters (h100-ib, a100-pcie and others), or a YAML file of yours."""
    traces: str = ""
    """Another name of --read, for a folder."""

    def run(self) -> None:
        """Runs or opens what is named, and prints what was found."""
        if self.read or self.traces:
            refuse_given(self, "has no effect with --read", leave_out=OF_READ)
            self._postmortem()
            return
        if self.hardware:
            raise UserError("--hardware goes with --read")
        if not self.program:
            raise UserError("nothing to diagnose: name a script, -m MODULE or a folder")
        if self.compare:
            refuse_given(self, "has no effect with --compare", leave_out=OF_COMPARE)
            sys.exit(self._compare())
        if self.fail_above is not None or self.json or self.track:
            raise UserError("--fail-above, --json and --track go with --compare")
        first = self.program[0]
        if len(self.program) == 1 and (first.endswith(".tar.gz") or Path(first).is_dir()):
            refuse_given(self, f"has no effect on what was watched: {first}", leave_out=OF_FOLDER)
            self._show(self._open(first))
        else:
            sys.exit(self._run_script())

    def _postmortem(self) -> None:
        from common.diagnose.opened import open_postmortem

        if self.traces and self.program:
            raise UserError(f"--traces runs nothing; leave out {self.program[0]}")
        named = [path for path in (self.traces, *self.read, *self.program) if path]
        postmortem = open_postmortem(*named, hardware=self.hardware)
        print("\n".join(postmortem.lines()))
        try:
            path = postmortem.write()
        except UserError as error:  # a folder of somebody else's is read all the same
            print(f"\nNot written: {error}")
        else:
            print(f"\nWritten: {path}" if path else "", end="\n" if path else "")

    def _compare(self) -> int:
        """Compares two sides; returns the exit status."""
        from common.diagnose.compared_runs import compare
        from common.diagnose.trackers import installed, track

        if len(self.program) != 2:
            raise UserError(f"--compare takes two folders, not {len(self.program)}")
        limit = self.fail_above
        if limit is not None and not 0 <= limit < math.inf:
            raise UserError(f"--fail-above {limit}: a percentage from 0 on")
        check_output("--json", self.json or None)
        tracker = installed() if self.track else ""
        comparison = compare((self.program[0], self.program[1]), self._open)
        content = comparison.as_json(limit)
        if self.json:
            write_output("--json", self.json, json.dumps(content, indent=1))
        print("\n".join(comparison.lines(limit)))
        if tracker:
            name = f"{self.program[0]} against {self.program[1]}"
            try:
                track(tracker, name, comparison.told(), comparison.verdicts())
                print(f"Sent to {tracker}.")
            except Exception as error:  # the tracker's; the gate's status stands
                print(f"--track: not sent to {tracker}: {error}", file=sys.stderr)
        return comparison.status(limit) if limit is not None else 0

    def _open(self, path: str) -> Opened:
        from common.diagnose.opened import open_diagnosis

        return open_diagnosis(path, self._baseline())

    def _baseline(self) -> str | None:
        """Returns the baseline's tables; a bundle's are made first."""
        from common.diagnose.opened import open_diagnosis

        if not self.baseline:
            return None
        return str(open_diagnosis(self.baseline).case.run.folder)

    def _show(self, opened: Opened) -> None:
        paths = opened.write()
        print("\n".join(opened.lines()))
        print(f"\nWritten: {', '.join(str(path) for path in paths)}")

    def _run_script(self) -> int:
        from common.cluster.watched import check_program, run_watched

        if self.nproc < 1:
            raise UserError(f"--nproc {self.nproc}: at least 1")
        check_program(self.program)
        self._options(Path())
        folder, written = self._new_folders()
        variables = self._options(folder).to_environment()
        steps = f"{self.warmup} + {self.window} + {self.bucket_steps}"
        print(
            f"ddplab diagnose: {' '.join(self.program)} really runs: what it writes is written. "
            f"Watched: {'all' if self.to_end else steps} steps; record: {written}",
            file=sys.stderr,
            flush=True,
        )
        printed: list[bool] = []

        def as_soon_as_known() -> None:
            if not printed and _is_complete(written, self.nproc):
                printed.append(True)
                self._show_or_say(written)

        try:
            status = run_watched(self.program, self.nproc, variables, meanwhile=as_soon_as_known)
        except KeyboardInterrupt:
            status = 130
        if not printed:
            self._show_or_say(written)
        return status

    def _show_or_say(self, folder: Path) -> None:
        """Prints the diagnosis; where there is none, one line. The exit status is the script's."""
        try:
            if not any(folder.glob("rank*.jsonl")):
                raise UserError("no update of a torch optimizer was seen")
            self._show(self._open(str(folder)))
        except UserError as error:
            print(f"ddplab diagnose: no diagnosis: {error}", file=sys.stderr)
        except Exception:  # a bug of ours must not end somebody's training
            traceback.print_exc()

    def _options(self, folder: Path):
        from ddplab_watch import Options

        try:
            return Options(
                folder=str(folder),
                named=True,
                warmup=self.warmup,
                window=self.window,
                bucket_steps=self.bucket_steps,
                profile_steps=self.profile_steps,
                probe=not self.no_probe,
                verify=self.verify,
                to_end=self.to_end,
                anonymise=self.anonymise,
            )
        except ValueError as error:
            raise UserError(str(error)) from None

    def _new_folders(self) -> tuple[Path, Path]:
        """Returns the bundle's folder, and that below it which this start of the job writes."""
        from ddplab_watch.options import requeued_folder

        folder = Path(self.bundle or f"outputs/watch/{time.strftime('%Y%m%d-%H%M%S')}").absolute()
        if folder.is_file():
            raise UserError(f"--bundle {folder}: it is a file, and a folder is needed")
        try:
            written = requeued_folder(folder, "rank0.jsonl")
        except FileExistsError as error:
            raise UserError(f"--bundle {error}") from None
        if written.exists() and any(written.iterdir()):
            raise UserError(f"--bundle {written}: exists; give each run a folder of its own")
        with naming_os_errors(f"--bundle {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        return folder, written


def _is_complete(folder: Path, ranks: int) -> bool:
    """Returns True if every rank has written the end of its window."""
    files = list(folder.glob("rank*.jsonl"))
    if len(files) < ranks:
        return False
    return all('"table": "end"' in file.read_text()[-400:] for file in files)


def split_script(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits ``ddplab diagnose``'s own flags from the script and its arguments, which come after.

    A script's flags may look like ours, so ours end with the first word that is no flag of ours nor
    the value of one. Two folders to compare have no flags: there, ours may follow.
    """
    arguments, folders, index = [*arguments], [], 0
    while index < len(arguments):
        word = arguments[index]
        flag = word.lstrip("-").replace("-", "_")
        if not word.startswith("-") and "--compare" in arguments[:index]:
            folders.append(arguments.pop(index))
            continue
        if not word.startswith("-") or word == "-m":
            break
        takes_value = (
            flag not in FLAGS_WITHOUT_VALUE and "=" not in flag and flag not in ("h", "help")
        )
        index += 2 if takes_value else 1
    return arguments[:index], [*folders, *arguments[index:]]
