"""Voilà on this machine: the notebook as a page, behind a token, and its end without leftovers.

Nothing of the user's own Jupyter is read: configuration, extensions, kernels and startup files come
from this environment alone. So what is broken there breaks nothing here. The page's template is the
project's (``jupyter/voila/templates``), as that of Voilà loads fonts from the network.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.analysis.runs import given_folder
from common.errors import RunFailed, UserError
from common.explore.chosen_model import MODEL_VARIABLE, ChosenModel, write_model
from common.runtime.paths import project_root
from common.runtime.processes.child import RANK_VARIABLES
from common.runtime.processes.orphans import ending_with_parent

HOST = "127.0.0.1"
RUN_DIR_VARIABLE, TRACES_VARIABLE = "DDPLAB_EXPLORE_RUN", "DDPLAB_EXPLORE_TRACES"
"""Variables that name the run directory and the folder of traces for the notebook's kernel."""
OWN = Path(__file__).parent / "jupyter"
STARTS_WITHIN_S, ENDS_WITHIN_S = 60.0, 10.0
LOG = "voila.log"


@dataclass(frozen=True)
class Served:
    """A page that is served: its address with the token, and the server."""

    url: str
    process: subprocess.Popen
    log: Path

    def wait(self) -> None:
        """Waits for ever. Raises RunFailed where the server ends by itself."""
        status = self.process.wait()
        raise RunFailed(f"the server ended with status {status}: {_last_line(self.log)}")


def port_to_use(port: int) -> int:
    """Returns ``port``, or a free one for 0.

    Raises:
        UserError: the port is taken, or is none.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: 1 to 65535, or 0 for a free one")
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HOST, port))
        except OSError as error:
            reason = "in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise UserError(
                f"--port {port}: {reason}; give another one, or none for one that is free"
            ) from None
        return trial.getsockname()[1]


def token_to_use(token: str | None) -> str:
    """Returns ``token``, or a random one for None. Raises UserError for one no URL can hold."""
    if token is None:
        return secrets.token_urlsafe(24)
    if not re.fullmatch(r"[\w.~-]+", token, re.ASCII):
        raise UserError(f"--token {token!r}: letters, digits, and . _ ~ - only, at least one")
    return token


@contextlib.contextmanager
def serving(
    run_dir: str = "",
    port: int = 0,
    token: str | None = None,
    model: ChosenModel | None = None,
    traces: str = "",
) -> Iterator[Served]:
    """Serves the explorer while the block runs; then server and kernels are gone.

    Args:
        run_dir: Run of assignment 2; by default the newest one.
        port: Port of the page; 0 for one that is free.
        token: Word without which nobody on this machine gets at the page; None for a random one.
        model: Model to put on clusters; None for the default.
        traces: Folder with a job's traces, shown first.

    Raises:
        UserError: a port or a token that cannot be used.
        RunFailed: the server does not start.
    """
    port, token = port_to_use(port), token_to_use(token)
    with tempfile.TemporaryDirectory(prefix="ddplab-explore-") as name:
        folder = Path(name)  # readable by its owner alone, as the token is in it
        (folder / "voila.json").write_text(json.dumps(_configuration(folder, port, token)))
        variables = _variables(folder, run_dir)
        variables[TRACES_VARIABLE] = str(Path(traces).resolve()) if traces else ""
        if model is not None:
            write_model(model, folder / "model")
            variables[MODEL_VARIABLE] = str(folder / "model")
        notebook = project_root() / "notebooks" / "explore.ipynb"
        log = folder / LOG
        with log.open("w") as output:
            process = subprocess.Popen(
                ending_with_parent([sys.executable, "-m", "voila", str(notebook)]),
                env=variables,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the server
            )
        try:
            _await_start(process, port, log)
            yield Served(f"http://{HOST}:{port}/?token={token}", process, log)
        finally:
            _end(process)


def _configuration(folder: Path, port: int, token: str) -> dict:
    return {
        "Voila": {
            "ip": HOST,
            "port": port,
            "port_retries": 0,
            "open_browser": False,
            "token": token,
            "connection_dir_root": str(folder),
        },
        "VoilaConfiguration": {
            "template": "explore",
            "theme": "light",
            "allow_template_override": "NO",
            "allow_theme_override": "NO",
            "file_allowlist": [],
        },
        # A page that is closed ends its kernel; one whose browser died leaves it, for so long.
        "MappingKernelManager": {"cull_idle_timeout": 900, "cull_interval": 60},
    }


def _variables(folder: Path, run_dir: str) -> dict[str, str]:
    """Returns the server's environment, in which Jupyter finds nothing of the user's."""
    left_out = re.compile(rf"{RANK_VARIABLES.pattern}|(JUPYTER|IPYTHON|VOILA).*|PYTHONSTARTUP")
    kept = {name: value for name, value in os.environ.items() if not left_out.fullmatch(name)}
    path = [str(project_root()), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "JUPYTER_NO_CONFIG": "1",
        "JUPYTER_CONFIG_DIR": str(folder),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PATH": str(OWN),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": os.pathsep.join(path),
        RUN_DIR_VARIABLE: str(given_folder(run_dir).resolve()) if run_dir else "",
    }


def _await_start(process: subprocess.Popen, port: int, log: Path) -> None:
    """Waits until the server answers. Raises RunFailed where it does not."""
    until = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RunFailed(f"the server did not start: {_last_line(log)}")
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        time.sleep(0.1)
    raise RunFailed(f"the server did not start within {STARTS_WITHIN_S:.0f} s: {_last_line(log)}")


def _end(process: subprocess.Popen) -> None:
    """Ends the server, which ends its kernels; then whatever of them is left."""
    try:
        kernels = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        kernels = []
    process.terminate()
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, survivors = psutil.wait_procs(kernels, timeout=2)
    for kernel in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            kernel.kill()
    psutil.wait_procs(survivors, timeout=5)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
