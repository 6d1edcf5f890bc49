"""A watched script behaves as without the watch, whatever it does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from watch_support import MAIN, SCRIPTS, rows_of

HERE = Path(__file__).parent


def run(*words: object, cwd: Path, watched: bool = True, **variables: str):
    start = [sys.executable, *(["-m", "ddplab_watch"] if watched else [])]
    return subprocess.run(
        [*start, *map(str, words)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


SCRIPT_TEXTS = {
    "ends with a status": "import sys\nprint('so far')\nsys.exit(3)",
    "fails": "import json\nprint('so far')\njson.loads('{')",
    "reads its name": "import sys\nprint(sys.argv, __name__, __file__)",
    "reads its annotations": "def f(x: int): ...\nprint(f.__annotations__)",
    "imports its neighbour": "import neighbour\nprint(neighbour.NAME)",
    "spawns": (
        "import multiprocessing\n\ndef child(queue):\n    queue.put(__name__)\n\n"
        "if __name__ == '__main__':\n    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n    print(queue.get())\n    process.join()\n"
    ),
    "has handlers": (
        "import atexit, os, signal\natexit.register(lambda: print('its own end'))\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('its own handler'), exit(9)))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    ),
}


@pytest.mark.parametrize("text", SCRIPT_TEXTS.values(), ids=SCRIPT_TEXTS)
def test_output_and_status_are_the_scripts_own(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "neighbour.py").write_text("NAME = 'here'")
    plain = run("script.py", "--lr", "0.1", cwd=tmp_path, watched=False)
    watched = run("script.py", "--lr", "0.1", cwd=tmp_path)
    assert watched.stdout == plain.stdout
    assert watched.returncode == plain.returncode
    # A traceback's last lines are the same; above them are those of the runner.
    assert watched.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert not (tmp_path / "ddplab-watch").exists()


@pytest.mark.parametrize("ends", ["", "raise SystemExit", "import sys\nsys.exit(0)"])
def test_a_rank_that_is_done_is_not_torn_down(tmp_path: Path, ends: str) -> None:
    """What runs as the interpreter goes cannot abort a rank: pytorch#190489 does so, by chance."""
    (tmp_path / "script.py").write_text(
        "import atexit, os, threading\n\nclass Late:\n    def __del__(self):\n"
        "        os.abort()\n\nlate = Late()\n"
        "threading.Timer(0.2, lambda: print('thread')).start()\n"
        f"atexit.register(print, 'handler', end='')\nprint('end')\n{ends}\n"
    )
    done = run("script.py", cwd=tmp_path, RANK="0")
    assert (done.returncode, done.stdout) == (0, "end\nthread\nhandler")
    assert run("script.py", cwd=tmp_path, watched=False).returncode == -signal.SIGABRT


def test_a_module_is_run_with_its_package() -> None:
    plain = run("-m", "package.train", "--lr", cwd=HERE, watched=False)
    watched = run("-m", "package.train", "--lr", cwd=HERE)
    assert watched.stdout == plain.stdout == "42 __main__ package ['--lr']\n"
    assert watched.returncode == plain.returncode == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], "none.py: no such file"),
        ([], "usage"),
        (["window=0", "x.py"], "window is 0"),
        (["depth=3", "x.py"], "unknown setting 'depth'"),
        (["window=many", "x.py"], "window is 'many'"),
    ],
)
def test_a_mistake_is_said_in_a_line(tmp_path: Path, words: list[str], said: str) -> None:
    done = run(*words, cwd=tmp_path)
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.returncode == 2


def test_a_script_that_never_updates_is_left_alone(rank_server, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\nprint(torch.ones(2).sum().item())")
    done = rank_server.run(MAIN, f"folder={tmp_path}/bundle", tmp_path / "script.py")
    assert (done.exit_codes, done.stdout, done.stderr) == ([0], ["2.0\n"], [""])
    assert not (tmp_path / "bundle").exists()


def test_where_nothing_can_be_written_the_script_runs_all_the_same(
    rank_server, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    words = (SCRIPTS / "loop.py", tmp_path / "out", "--steps", 4)
    done = rank_server.run(MAIN, f"folder={tmp_path}/taken/bundle", *words)
    assert done.exit_codes == [0]
    assert (tmp_path / "out-0.json").is_file()
    assert done.stderr[0].count("ddplab-watch") == 1


def test_workers_that_are_ahead_do_not_mix_up_the_samples(loop_run) -> None:
    folder, _ = loop_run("--workers", 2, count=1, anonymise=1)
    [row] = rows_of(folder, 0, "identities")
    first = (1 + 2) * 8  # the first update is not recorded, nor are samples of the warm-up
    assert row["samples"] == list(range(first, first + 7 * 8))
    # Names were to be hashed: neither the host nor a folder is in the bundle.
    text = (folder / "bundle" / "rank0.jsonl").read_text()
    assert f'"{socket.gethostname()}"' not in text
    assert str(folder) not in text
    assert "loop.py" not in text


def test_a_process_that_never_imports_torch_imports_nothing_of_the_watch(tmp_path: Path) -> None:
    code = "import sys; print(sorted(n for n in sys.modules if n.startswith(('torch', 'ddplab'))))"
    done = run("-c", code, cwd=tmp_path, watched=False)
    assert done.stdout.strip() == "[]"
    watched = run("-c", code, cwd=tmp_path, watched=False, DDPLAB_WATCH=str(tmp_path))
    assert "torch" not in watched.stdout.replace("ddplab_watch", "")


def test_a_killed_rank_leaves_what_was_seen(rank_server, tmp_path: Path) -> None:
    code = (
        (SCRIPTS / "loop.py")
        .read_text()
        .replace(
            "        step += 1\n",
            "        step += 1\n        if step == 30:\n            import os, time\n"
            "            time.sleep(2.5)\n            os.kill(os.getpid(), 9)\n",
        )
    )
    (tmp_path / "killed.py").write_text(code)
    words = (f"folder={tmp_path}/bundle", "warmup=2", "window=90")
    script = (tmp_path / "killed.py", tmp_path / "out", "--steps", 99)
    assert rank_server.run(MAIN, *words, *script).exit_codes == [-9]
    lines = (tmp_path / "bundle" / "rank0.jsonl").read_text()
    assert lines.count('"table": "steps"') > 20
