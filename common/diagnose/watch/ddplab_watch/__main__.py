"""``python -m ddplab_watch [OPTION=VALUE ...] train.py ...``: runs a script watched.

Also ``-m package.train``. The script sees its own ``sys.argv``, ``__file__`` and ``__name__``; its
exit status and its traceback are its own.

A rank that is done leaves before Python tears the interpreter down: DDP's process group outlives
``destroy_process_group``, and a thread of gloo that still releases its last tensors would abort the
process ("terminate called without an active exception", pytorch#190489).
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import runpy
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from ddplab_watch import auto
from ddplab_watch.options import SETTINGS, Options

USAGE = (
    "usage: python -m ddplab_watch [folder=FOLDER] [window=30] [warmup=5] [bucket_steps=10] "
    "[profile_steps=3] [probe=1] [verify=0] [to_end=0] [anonymise=0] "
    "SCRIPT.py|-m MODULE [ARGUMENT ...]"
)


def main(words: list[str]) -> None:
    """Runs what the words name, watched."""
    settings, words = split(words)
    if not words or words[0] in ("-h", "--help") or words == ["-m"]:
        if words and words != ["-m"]:
            print(USAGE)
            return
        refuse(USAGE)
    environment = dict(os.environ)
    folder = settings.pop("folder", None)
    if settings:
        environment[SETTINGS] = ",".join(f"{name}={value}" for name, value in settings.items())
    try:
        options = Options.from_environment(environment)
    except ValueError as error:
        refuse(f"error: {error}")
    chosen = str(Path(folder or options.folder).absolute())
    options = replace(options, folder=chosen, named=bool(folder) or options.named)
    os.environ.update(options.to_environment())  # of processes that the script starts
    auto.install()
    try:
        run(words)
    except SystemExit as ended:
        if ended.code:
            raise
    if "RANK" in os.environ:
        leave()


def run(words: list[str]) -> None:
    """Runs the script or the module that the words name, with the words that follow it."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    script = Path(words[0])
    if not script.is_file():
        refuse(f"error: {script}: no such file; {USAGE}")
    sys.argv = words
    sys.path[0] = str(script.absolute().parent)
    run_as_main(script.absolute())


def leave() -> NoReturn:
    """Ends the process as Python does, up to where it would take the interpreter apart."""
    threading._shutdown()  # threads that are no daemons end first, then exit handlers run
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def refuse(text: str) -> NoReturn:
    """Ends the process as the user's mistake asks for: the text on stderr, status 2."""
    print(text, file=sys.stderr)
    sys.exit(2)


def run_as_main(script: Path) -> None:
    """Runs a file as ``python`` does, in a module that lives as long as the process.

    ``runpy.run_path`` would empty it at the end, before the script's own exit handlers run, and
    would change ``sys.argv``.
    """
    module = ModuleType("__main__")
    module.__file__ = str(script)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    with io.open_code(str(script)) as file:
        # Not as this file is compiled: its ``annotations`` would make strings of the script's.
        code = compile(file.read(), str(script), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Splits ``name=value`` words, which come first, from the script and its arguments."""
    settings: dict[str, str] = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words[0].partition("=")
        settings[name] = value
        words = words[1:]
    return settings, words


if __name__ == "__main__":
    main(sys.argv[1:])
