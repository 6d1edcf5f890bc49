"""The frame of a script: settings from flags, variables and YAML; errors in one line."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import io
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from common.errors import Preempted, RunFailed, UserError
from common.runtime.flags import file_flags

Settings = TypeVar("Settings")
SAVED = 75
"""Exit status of a program that was told to stop and can go on from what it saved."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of the system that a user can mend: missing permissions, no room."""

NO_TEMPORARY = "No usable temporary directory"
"""Beginning of what Python's tempfile says where it can write to no folder."""

SAID_S = 1.0
"""What a rank that prints nothing waits until it leaves, for the one that does."""


def run_script(
    main: Callable[[Settings], None],
    settings_type: type[Settings],
    *,
    variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses settings, runs ``main(settings)`` and leaves with an exit status a caller can trust.

    Args:
        main: does the work.
        settings_type: frozen dataclass; a field per flag.
        variables: environment variables that set a flag, such as ``{"NUMEL": "numel"}``.
        arguments: the command line; ``sys.argv`` by default.

    Exit status: 0 done, 1 a bug or a rank that died, 2 a user's mistake, 75 stopped with its work
    saved, 130 interrupted.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    leave_when_terminated()
    with exit_status():
        argv = list(sys.argv[1:] if arguments is None else arguments)
        main(parse_settings(settings_type, argv, Path(sys.argv[0]).stem, variables))
    leave_rank()


def leave_rank(status: int = 0) -> None:
    """Ends a rank that has done or saved its work, without tearing down the interpreter.

    DDP keeps its process group alive beyond ``destroy_process_group``, and with it gloo's threads.
    A thread that still releases its last tensors when the interpreter ends aborts the process
    ("terminate called without an active exception", pytorch#190489): a rank that had finished
    would fail the job.
    """
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def exit_status() -> Iterator[None]:
    """Turns errors inside the block into one line and an exit status that ``run_script`` lists."""
    try:
        yield
    except Preempted as stop:
        if is_main_rank():
            print(f"stopped: {stop}", file=sys.stderr)
        leave_rank(SAVED)
        sys.exit(SAVED)
    except (Exception, KeyboardInterrupt) as raised:
        error = _user_mistake(raised) or raised
        if _group_stands():
            _end_failed_rank(error)
        if isinstance(error, UserError | RunFailed | KeyboardInterrupt):
            sys.exit(_report(error))
        raise


def is_full(error: BaseException) -> bool:
    """Returns True if a disk is full, or no temporary folder can be written to."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, OSError) and (error.errno in full or NO_TEMPORARY in str(error))


def _user_mistake(error: BaseException) -> UserError | None:
    """Returns the one-line error for what a user can mend; None for other errors.

    That is a file that may not be read or written, a full disk, and a GPU that is out of memory or
    busy.
    """
    if isinstance(error, OSError) and NO_TEMPORARY in str(error):
        return UserError(f"{error.strerror}: full, or not yours to write to; set TMPDIR to another")
    if isinstance(error, OSError) and error.errno in REFUSED:
        return UserError(f"{error.filename or 'a file of this run'}: {error.strerror}")
    if "torch" not in sys.modules:
        return None
    from common.runtime.machine.device import refused_by_gpu

    return refused_by_gpu(error)


def _group_stands() -> bool:
    """Returns True if the process group still exists after an error ended the block that joined it.

    ``process_group`` does not leave it where leaving would wait for the other ranks, as over NCCL.
    """
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _end_failed_rank(error: BaseException) -> None:
    """Reports an error and ends this process without tearing anything down.

    The end of the interpreter would wait for the other ranks, or for a GPU that does.
    """
    _ignore(signal.SIGTERM, signal.SIGINT)  # either would interrupt the report
    status = _report(error)
    if not isinstance(error, RunFailed):  # most often only the consequence of another rank's death
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):  # such as a full disk; the error is printed all the same
            get_error_handler().record_exception(error)  # in TORCHELASTIC_ERROR_FILE, if set
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _ignore(*signals: signal.Signals) -> None:
    for number in signals:
        with contextlib.suppress(ValueError):  # only the main thread may
            signal.signal(number, signal.SIG_IGN)


def _report(error: BaseException) -> int:
    """Prints the reason of the end, a bug with its traceback; returns the exit status."""
    if isinstance(error, UserError):
        report_error(error)
        return 2
    if isinstance(error, RunFailed):
        print(f"failed: {error}", file=sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    traceback.print_exception(error)
    return 1


def report_error(error: UserError) -> None:
    """Prints one line on standard error, from rank 0 unless only this rank has the error.

    The line is also written to the file that ``common.cluster.launch`` asked for. Ranks that print
    nothing wait a moment, because the first to leave makes torchrun end the others.
    """
    if "DDPLAB_ERROR_FILE" in os.environ:
        with contextlib.suppress(OSError):  # the line below says it, too
            Path(os.environ["DDPLAB_ERROR_FILE"]).write_text(str(error))
    if is_main_rank() or error.this_rank_only:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        _ignore(signal.SIGTERM)
        time.sleep(SAID_S)


def is_main_rank() -> bool:
    """Returns True on rank 0, by torchrun's or Slurm's variables, and in a single process."""
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"


def parse_settings(
    settings_type: type[Settings],
    argv: Sequence[str],
    section: str,
    variables: Mapping[str, str] | None = None,
) -> Settings:
    """Reads settings from, in rising priority: defaults, ``--config FILE``, variables, flags.

    ``section`` is the part of the YAML file that belongs to this script; a file without it is
    taken as a whole.

    Raises:
        UserError: an unknown key or an unusable value.
    """
    import tyro

    config_file, flags = _take_option(argv, "--config")
    arguments = file_flags(Path(config_file), settings_type, section) if config_file else []
    for variable, field in (variables or {}).items():
        if os.environ.get(variable):
            arguments += [f"--{field}", *re.split(r"[\s,]+", os.environ[variable].strip())]
    arguments = _later_wins(arguments + flags, settings_type)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(settings_type, args=arguments, description=settings_type.__doc__)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(captured.getvalue())) from None


NO_NUMBER = re.compile(
    r"Error parsing (?P<flag>[^\s:]+): (no type matching .*?)?"
    r"(?P<why>invalid literal for int\(\) with base 10|could not convert string to float): "
    r"'(?P<word>.*?)'.*"
)
"""Pattern of tyro's message on a word that is no number; optional flags name other types before."""


def one_line(boxed: str) -> str:
    """Returns the message of tyro's boxed error, without its frame, title and help text."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", boxed)
    text = re.sub(r"╭─*( [^─╭]*? )?─*╮", " ", text)
    text = re.sub(r"[│╭╮╰╯─]+", " ", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"^([^-]*? )?-{4,} | -{4,}", "", text)  # frames where there are no such letters
    text = text.replace("'None', ", "")  # what leaves a flag out, which nobody writes
    text = re.sub(r" (For full helptext|Argument helptext:|in \S+( \S+)? --help).*", "", text)
    if wrong := NO_NUMBER.match(text):
        kind = "a whole number" if "int" in wrong["why"] else "a number"
        return f"{wrong['flag']} {wrong['word']}: expected {kind}"
    return re.sub(r"^Unrecognized options: ", "unknown: ", text)


def _later_wins(arguments: list[str], settings_type: type) -> list[str]:
    """Drops a flag's earlier values, so that a later source replaces a list instead of adding."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not groups:
            groups.append([argument])
        else:
            groups[-1].append(argument)
    names = {field.name for field in dataclasses.fields(settings_type)}

    def key(group: list[str]) -> str:
        name = group[0].removeprefix("--").split("=")[0].replace("-", "_")
        return name.removeprefix("no_") if name.removeprefix("no_") in names else name

    last = {key(group): group for group in groups}
    return [part for group in last.values() for part in group]


def _take_option(argv: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    words = list(argv)
    for index, argument in enumerate(words):
        if argument == option:
            if index + 1 == len(words):
                raise UserError(f"{option} needs a file")
            return words[index + 1], words[:index] + words[index + 2 :]
        if argument.startswith(f"{option}="):
            return argument.split("=", 1)[1], words[:index] + words[index + 1 :]
    return None, words


def leave_when_terminated(grace_s: float = 5.0) -> None:
    """Makes SIGTERM end this process: by RunFailed, or after ``grace_s`` seconds by ``os._exit``.

    A rank that waits in a collective for one that is gone does not return to Python, where the
    exception would be raised. A thread then ends it, before torchrun's half minute is over.
    """

    def terminated(*_: object) -> None:
        # Slurm, uv and torchrun each pass the signal on; only the first one is acted on.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RunFailed("terminated: another rank died, or the job was cancelled")

    signal.signal(signal.SIGTERM, terminated)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
