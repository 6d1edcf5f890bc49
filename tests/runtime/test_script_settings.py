"""Settings of a script, where they come from and who wins; and the exit statuses of scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml
from interruptible import start_interruptible
from refusals import problem

from common.runtime.flags import as_flags
from common.runtime.script import parse_settings

VARIABLES = {"NUMEL": "numel", "MODEL": "model"}


@dataclass(frozen=True)
class Sweep:
    """A script's settings: a list, scalars and switches."""

    numel: tuple[int, ...] = (1, 2)
    model: str = "gpt2"
    rounds: int = 4
    lr: float = 1e-3
    backend: str | None = None
    run_id: str = ""
    static_graph: bool = False
    bucket_view: bool = True


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Returns ``parse(*flags, config=text or mapping, **variables)``: parses as ``sweep`` does."""

    def parse(*flags: str, config: str | bytes | dict | None = None, **variables: str) -> Sweep:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if config is not None:
            text = yaml.safe_dump(config) if isinstance(config, dict) else config
            file = tmp_path / "sweep.yaml"
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            flags = ("--config", str(file), *flags)
        return parse_settings(Sweep, flags, "sweep", VARIABLES)

    return parse


def test_without_any_source_the_defaults_hold(parse):
    assert parse() == Sweep()


def test_a_list_is_replaced_by_each_stronger_source_never_added_to(parse):
    config = {"numel": [3, 4, 5]}
    assert parse(config=config).numel == (3, 4, 5)
    assert parse(config=config, NUMEL="6 7").numel == (6, 7)
    assert parse("--numel", "8", config=config, NUMEL="6 7").numel == (8,)


def test_a_scalar_is_replaced_by_each_stronger_source(parse):
    config = {"model": "gpt2-medium"}
    assert parse(config=config).model == "gpt2-medium"
    assert parse(config=config, MODEL="gpt2-large").model == "gpt2-large"
    assert parse("--model=gpt2-xl", config=config, MODEL="gpt2-large").model == "gpt2-xl"


def test_a_switch_in_the_file_can_be_turned_by_a_flag_either_way(parse):
    config = {"static_graph": True, "bucket_view": False}
    assert parse(config=config) == Sweep(static_graph=True, bucket_view=False)
    assert parse("--no-static-graph", "--bucket_view", config=config) == Sweep()
    assert parse("--static_graph", "--no_static_graph") == Sweep()


def test_of_one_flag_given_twice_the_later_wins(parse):
    assert parse("--numel", "1", "--rounds", "2", "--numel", "5", "6").numel == (5, 6)


def test_flags_and_keys_may_be_written_with_dash_or_underscore(parse):
    for key in ("static_graph", "static-graph"):
        assert parse(f"--{key}").static_graph
        assert parse(config={key: True}).static_graph
    assert parse("--run-id", "a").run_id == parse("--run_id", "a").run_id == "a"


@pytest.mark.parametrize("text", ["6 7", "6,7", " 6, 7 ", "6\n7"])
def test_a_list_in_a_variable_may_be_split_by_spaces_or_commas(parse, text):
    assert parse(NUMEL=text).numel == (6, 7)


def test_an_empty_variable_counts_as_not_set(parse):
    assert parse(NUMEL="").numel == (1, 2)


@pytest.mark.parametrize(
    "settings",
    [
        Sweep(),
        Sweep(numel=(1, 10), backend=None, run_id="", lr=6e-4, static_graph=True),
        Sweep((1, 2, 3), "--two words=", -3, 1e-9, "gloo", "a", True, False),
    ],
)
def test_a_runs_own_config_or_flags_give_its_settings_again(parse, settings):
    config = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items()}
    assert parse(config=config) == settings
    assert parse(*as_flags(asdict(settings))) == settings


def test_a_preset_file_has_a_section_for_each_script(parse):
    preset = {"stages": ["sweep", "other"], "sweep": {"rounds": 2}, "other": {"bogus": 1}}
    assert parse(config=preset) == Sweep(rounds=2)


def test_a_preset_file_without_this_scripts_section_is_refused(parse):
    assert "'sweep'" in problem(parse, config={"stages": ["other"], "other": {"rounds": 2}})


@pytest.mark.parametrize("section", [5, [1, 2], None])
def test_a_section_that_holds_no_settings_is_refused(parse, section):
    assert "sweep.yaml" in problem(parse, config={"stages": ["sweep"], "sweep": section})


def test_an_unknown_key_is_refused_with_the_nearest_known_one(parse):
    message = problem(parse, config={"roundz": 3})
    assert "'roundz'" in message
    assert "did you mean 'rounds'" in message
    assert "sweep.yaml" in message


def test_an_unknown_flag_is_refused(parse):
    message = problem(parse, "--round", "3")
    assert "--round" in message
    assert "--rounds" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rounds", "x"), ("rounds", 1.5), ("rounds", [1, 2]), ("rounds", True), ("rounds", None)),
        *(("lr", "fast"), ("numel", [1, "x"]), ("static_graph", 3), ("static_graph", "maybe")),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_key(parse, key, value):
    assert key in problem(parse, config={key: value}).replace("-", "_")


@pytest.mark.parametrize("text", ["many", "1 x", "1.5"])
def test_a_variable_of_the_wrong_type_is_refused(parse, text):
    assert "numel" in problem(parse, NUMEL=text)


def test_a_missing_file_is_refused_by_name(parse, tmp_path):
    missing = str(tmp_path / "missing.yaml")
    assert "missing.yaml: No such file" in problem(parse, "--config", missing)
    assert "missing.yaml: No such file" in problem(parse, f"--config={missing}")
    assert "needs a file" in problem(parse, "--config")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"- 1\n- 2\n", b"rounds", b"rounds: [1"),
        *(b"a: \x00", b"\xff\xfe\x00", b"a: b: c", b"a: 2026-02-30"),
    ],
    ids=["empty", "list", "word", "unclosed", "control", "binary", "two colons", "no such day"],
)
def test_a_file_that_holds_no_settings_is_refused_by_name(parse, content):
    assert "sweep.yaml" in problem(parse, config=content)


def test_the_line_of_a_syntax_error_is_named(parse):
    assert "line 2" in problem(parse, config="rounds: 3\nlr: 1: 2\n")


SCRIPT = """
import sys, tempfile, time
from dataclasses import dataclass
from common.errors import RunFailed, UserError
from common.runtime.script import run_script

@dataclass(frozen=True)
class Settings:
    how: str = "well"
    rounds: int = 1

def main(settings):
    if settings.how == "mistake": raise UserError("rounds is 0; it must be above 0")
    if settings.how == "broken": raise RunFailed("rank 1 died")
    if settings.how == "full": open("/dev/full", "w").write("x" * 2**20)
    if settings.how == "nowhere":
        tempfile.tempdir = None
        tempfile._candidate_tempdir_list = lambda: ["/dev/null/below"]  # as where all are full
        tempfile.mkdtemp()
    if settings.how == "bug": raise ZeroDivisionError("a bug")
    if settings.how == "wait":
        print("ready", flush=True)
        time.sleep(60)

run_script(main, Settings)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "sweep.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("flags", "status", "line"),
    [
        ([], 0, ""),
        (["--how", "mistake"], 2, "error: rounds is 0; it must be above 0"),
        (["--rounds", "x"], 2, "error: "),
        (["--config", "missing.yaml"], 2, "error: missing.yaml: No such file or directory"),
        (["--how", "broken"], 1, "failed: rank 1 died"),
        (["--how", "nowhere"], 2, "error: No usable temporary directory found in "),
        pytest.param(
            *(["--how", "full"], 2, "error: a file of this run: No space left on device"),
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full"),
        ),
    ],
)
def test_the_exit_status_says_how_it_went_and_one_line_why(
    rank_server, script, flags, status, line
):
    done = rank_server.run(script, *flags)
    assert done.exit_codes == [status]
    assert done.stderr[0].startswith(line)
    assert len(done.stderr[0].splitlines()) == (1 if status else 0)


def test_a_rank_that_is_done_ends_before_threads_can_abort_it(tmp_path):
    # A thread in C++ that wants the interpreter while it is torn down aborts the process. What
    # the script printed and registered with atexit must not be lost by leaving earlier.
    path = tmp_path / "rank.py"
    path.write_text(
        "import atexit, sys\n"
        "from dataclasses import dataclass\n"
        "from common.runtime.script import run_script\n"
        "class Late:\n"
        "    def __del__(self, write=__import__('os').write): write(2, b'torn down')\n"
        "sys.late = Late()\n"
        "@dataclass(frozen=True)\n"
        "class Settings: pass\n"
        "atexit.register(print, 'registered')\n"
        "run_script(lambda settings: print('done'), Settings)\n"
    )
    for variables, teardown in (({}, "torn down"), ({"RANK": "1"}, "")):
        done = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, env=os.environ | variables
        )
        assert (done.returncode, done.stdout.split()) == (0, ["done", "registered"])
        assert done.stderr == teardown


def test_a_bug_keeps_its_traceback(rank_server, script):
    done = rank_server.run(script, "--how", "bug")
    assert done.exit_codes == [1]
    assert "Traceback" in done.stderr[0]


@pytest.mark.parametrize(
    ("sent", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 1, "failed")]
)
def test_a_signal_ends_the_script_with_one_line(script, sent, status, word):
    command = [sys.executable, str(script), "--how", "wait"]
    with start_interruptible(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == status
    assert stderr.startswith(word)
    assert len(stderr.splitlines()) == 1


WAITING = """
import ctypes
from common.runtime.script import leave_when_terminated

leave_when_terminated(grace_s=0.2)
libc, mutex = ctypes.CDLL(None), (ctypes.c_char * 64)()
print("ready", flush=True)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it waits for a lock of glibc's")
def test_a_script_that_waits_outside_python_is_terminated_all_the_same():
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(20) == 1
