"""Attacks on the grader: each ends in an error, gains nothing, and leaves no process.

Attacks that take seconds, and those on all sandboxes but the strongest, are marked ``grading``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from interruptible import wait_until

from common.course.grading.grade import Grader
from common.course.outcomes import Outcome
from common.course.sandbox import own_root
from common.course.sandbox.isolation import strongest_isolation, why_unavailable
from common.course.sandbox.outside import has_ended
from common.course.sandbox.sandbox import Sandbox
from common.course.sandbox.student import Student, lay_out, lay_out_student, readable
from common.course.sandbox.wire import Ended, Raised, Remote
from common.course.submission import HandedIn, Submission
from common.course.tasks import EXERCISES
from common.errors import RunFailed, UserError
from common.runtime.paths import project_root

ROOT = project_root()
ANSWER_S = 60.0
ENDLESS, ENDLESS_S = ("never ends", "forks without end"), 0.5
"""Attacks that do not answer, and how long they are waited for."""
GIB = 2**30
KINDS = [kind for kind in ("namespaces", "user namespaces") if not why_unavailable(kind)]
ALL_KINDS = KINDS + [kind for kind in ("other user",) if not why_unavailable(kind)]
GRADING = pytest.mark.grading
TARGET = "loss_scale.py"
HIDDEN = ROOT / "tests" / "exercises" / "hidden"


def speaks(text: str, *buffers: str) -> str:
    """Returns an exercise that answers by a message of its own: JSON, and buffers behind it.

    Args:
        text, buffers: expressions in Python.
    """
    return (
        "import struct, sys, time\n\ndef attack():\n    peer = sys._getframe(1).f_locals['self']\n"
        f"    text, buffers = ({text}).encode(), [{', '.join(buffers)}]\n"
        "    head = struct.pack('<QI', len(text), len(buffers))\n"
        "    head += b''.join(struct.pack('<Q', len(buffer)) for buffer in buffers)\n"
        "    peer.connection.sendall(head + text + b''.join(buffers))\n    time.sleep(60)\n"
    )


# What a student may write in place of ``loss_scale``; the words that an honest end has.
ATTACKS = {
    "ends at import": ("import os\nos._exit(0)", "process has ended"),
    "never ends": ("while True: pass", "no answer in time"),
    "forks without end": (
        "import os\n\ndef attack():\n    while True:\n        os.fork()",
        "process has ended|no answer|BlockingIOError|talks|message",
    ),
    "takes 20 GB": ("def attack():\n    return len(bytearray(20 * 2**30))", "MemoryError"),
    "writes 100 GB": (
        "def attack():\n    for number in range(1000):\n"
        "        with open(f'/tmp/{number}', 'wb') as file:\n"
        "            for _ in range(100):\n                file.write(bytes(2**20))",
        "OSError|process has ended",
    ),
    "writes to every descriptor": (
        "import os\n\ndef attack():\n    for number in range(3, 200):\n"
        "        try:\n            os.write(number, b'[\"value\", 1]' * 99)\n"
        "        except OSError:\n            pass\n    return 1",
        "message|process has ended|no answer",
    ),
    "reads the hidden tests": (
        f"def attack():\n    return open({str(HIDDEN / 'test_models.py')!r}).read()",
        "FileNotFoundError|PermissionError",
    ),
    "reads the references": (
        f"def attack():\n    return open({str(ROOT / EXERCISES / TARGET)!r}).read()",
        "FileNotFoundError|PermissionError",
    ),
    "looks for files of the grader": (
        "import os\n\ndef attack():\n"
        "    found = [r for r, _, names in os.walk('/') if 'test_one_device.py' in names]\n"
        "    raise LookupError(found)",
        r"LookupError: \[\]",
    ),
    "calls a socket outside": (
        "import socket\n\ndef attack():\n"
        "    socket.create_connection(('192.0.2.1', 80), timeout=2)",
        "OSError|unreachable|TimeoutError",
    ),
    "kills the first process": (
        "import os\n\ndef attack():\n    os.kill(1, 9)\n    os.kill(os.getppid(), 9)\n"
        "    raise LookupError('it is still there')",
        "PermissionError|still there",
    ),
    "looks into the first process": (
        "def attack():\n    return open('/proc/1/mem', 'rb').read(1)",
        "PermissionError",
    ),
    "mounts": (
        "import ctypes, os\n\ndef attack():\n    libc = ctypes.CDLL(None, use_errno=True)\n"
        "    done = libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)\n"
        "    raise OSError(ctypes.get_errno(), f'mount: {done}')",
        "PermissionError: .*mount: -1",
    ),
    "writes to Python's own files": (
        "import os\n\ndef attack():\n    open(os.__file__, 'a').write('x')",
        "PermissionError|OSError: .*Read-only",
    ),
    "calls torch's DDP": (
        "import torch\n\ndef attack():\n"
        "    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))",
        "PermissionError: .*not for exercises",
    ),
    "finds torch's DDP among classes": (
        "import torch\n\ndef attack():\n    found = [c for c in torch.nn.Module.__subclasses__() "
        "if c.__name__ == 'DistributedDataParallel']\n    found[0](torch.nn.Linear(1, 1))",
        "PermissionError: .*not for exercises|IndexError",
    ),
    "imports torch's FSDP anew": (
        "import sys\n\ndef attack():\n    for name in list(sys.modules):\n"
        "        if name.startswith('torch.distributed.fsdp'):\n            del sys.modules[name]\n"
        "    from torch.distributed.fsdp import fully_shard\n    fully_shard(None)",
        "ImportError|ModuleNotFoundError",
    ),
    "assigns buckets by torch's C++": (
        "import torch.distributed as dist\n\ndef attack():\n"
        "    return dist._compute_bucket_assignment_by_size([], [1])",
        "PermissionError: .*not for exercises",
    ),
    "calls this project's simulator": (
        "def attack():\n    import common.perfmodel.model",
        "ModuleNotFoundError",
    ),
    "returns what cannot be held": (
        "import numpy as np\n\ndef attack():\n    return [np.zeros(2**27)] * 9",
        "message|process has ended|MemoryError",
    ),
    "sends a tensor without bytes": (
        speaks("""'{"list": ["value", {"tensor": ["float32", [1000], 0]}]}'""", "b''"),
        "message cannot be read",
    ),
    "sends a buffer again and again": (
        speaks(
            """'{"list": ["value", {"list": [' + ','.join(['{"bytes": 0}'] * 9) + ']}]}'""",
            "bytes(2**20)",
        ),
        "message cannot be read",
    ),
    "sends a column of a single value": (
        speaks(
            """'{"list": ["value", {"table": {"list": [{"list": ["a", 1]},'"""
            """'{"list": ["b", {"array": ["|u1", [4], 0]}]}]}}]}'""",
            "bytes(4)",
        ),
        "message cannot be read",
    ),
    "sends millions of empty lists": (
        speaks("""'[' + '[],' * 2**22 + '[]]'"""),
        "message is too large",
    ),
    "calls torch's attention by its operator": (
        "import torch\n\ndef attack():\n    query = torch.ones(1, 2, 8, 4)\n"
        "    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)",
        "PermissionError: .*not for exercises",
    ),
    "calls torch's attention below autograd": (
        "import torch\n\ndef attack():\n    query = torch.ones(1, 2, 8, 4)\n"
        "    with torch.no_grad():\n"
        "        torch._C._nn.scaled_dot_product_attention(query, query, query)",
        "PermissionError: .*not for exercises",
    ),
    "makes torch's counter without its constructor": (
        "import sys\n\ndef attack():\n"
        "    counter = getattr(sys.modules['torch.utils.flop_counter'], 'Flop' + 'CounterMode')\n"
        "    return counter.__new__(counter).get_total_flops()",
        "PermissionError: .*not for exercises",
    ),
    "starts a Python from which nothing is withheld": (
        "import os, sys\n\ndef attack():\n    os.execv(sys.executable, ['python', '-c', 'pass'])",
        "PermissionError",
    ),
    "keeps memory that no process is seen to have": (
        "import os\n\ndef attack():\n    return os.memfd_create('states')",
        "PermissionError",
    ),
    "leaves memory for the next check": (
        "import ctypes\n\ndef attack():\n    libc = ctypes.CDLL(None, use_errno=True)\n"
        "    found = libc.shmget(4711, 4096, 0o1666)\n"
        "    raise OSError(ctypes.get_errno(), f'shmget: {found}')",
        "PermissionError: .*shmget: -1",
    ),
    "nests without end": (
        "def attack():\n    found = []\n    for _ in range(10**5):\n        found = [found]\n"
        "    return found",
        "RecursionError|message|process has ended",
    ),
}


def lay(folder: Path, below: str, source: str | None = None, **probes: str) -> str:
    """Lays out a part of a sandbox's folder; returns its name.

    Args:
        folder: the sandbox's folder.
        below: name of the part.
        source: text of loss_scale.py; by default the reference's.
        probes: text of each module of the checks' own.
    """
    exercise = ROOT / EXERCISES / TARGET
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in probes.items():
            Path(scratch, f"{name}.py").write_text(text)
        lay_out_student(
            folder, ROOT, below, Path(scratch), lambda path: source or path.read_text(), [exercise]
        )
    return below


def strongest_first(kinds: list[str]) -> list:
    """Returns kinds of sandboxes, of which all but the first are marked ``grading``."""
    return [*kinds[:1], *(pytest.param(kind, marks=GRADING) for kind in kinds[1:])]


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Callable[[str], Sandbox]]:
    """Yields ``sandboxes(kind)``: one of each kind, started when it is first asked for."""
    started: dict[str, Sandbox] = {}
    with ExitStack() as stack:

        def of(kind: str) -> Sandbox:
            if kind not in started:
                # Below a folder that everybody may enter, which pytest's are not.
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                lay_out(folder, ROOT)
                started[kind] = stack.enter_context(Sandbox(folder, kind))
            return started[kind]

        yield of


@pytest.fixture
def kind() -> str:
    """Returns the kind of sandbox where a test does not say which."""
    return KINDS[0]


@pytest.fixture
def sandbox(sandboxes: Callable[[str], Sandbox], kind: str) -> Sandbox:
    return sandboxes(kind)


@pytest.fixture
def part(sandbox: Sandbox) -> Callable[[str], str]:
    """Returns ``part(source)``: lays out a part of the sandbox in which loss_scale.py is this."""

    def lay_one(source: str) -> str:
        return lay(sandbox.folder, f"part-{len(list(sandbox.folder.iterdir()))}", source)

    sandbox.afresh()
    return lay_one


@pytest.fixture
def strict_umask() -> Iterator[None]:
    """Lets nobody else read what is written during a test."""
    before = os.umask(0o077)
    yield
    os.umask(before)


WITHOUT_NAMESPACES = (
    "ends at import",
    "never ends",
    "forks without end",
    "takes 20 GB",
    "kills the first process",
    "writes to every descriptor",
    "calls torch's DDP",
    "starts a Python from which nothing is withheld",
)
SLOW = ("forks without end", "returns what cannot be held", "looks for files of the grader")


def cases() -> Iterator:
    """Yields a kind of sandbox and an attack's name."""
    for kind in ALL_KINDS:
        for name in ATTACKS if kind in KINDS else WITHOUT_NAMESPACES:
            is_quick = kind == KINDS[0] and name not in SLOW
            yield pytest.param(kind, name, marks=() if is_quick else GRADING)


@pytest.mark.parametrize(("kind", "name"), [*cases()])
def test_an_attack_ends_in_an_error(sandbox: Sandbox, part: Callable, kind: str, name: str) -> None:
    source, expected = ATTACKS[name]
    timeout_s = ENDLESS_S if name in ENDLESS else ANSWER_S
    peer = sandbox.start(part(source), timeout_s=timeout_s)
    with pytest.raises((Raised, Ended), match=expected):
        peer.module("exercise loss_scale").attack()
    sandbox.afresh()
    wait_until(lambda: len(sandbox.processes()) <= 1)
    if not (sandbox.folder / "honest").exists():
        lay(sandbox.folder, "honest", "def attack():\n    return 7")
    again = sandbox.start("honest")
    assert again.module("exercise loss_scale").attack() == 7


def test_what_crosses_is_data(sandbox: Sandbox, part: Callable) -> None:
    source = (
        "import os\n\nclass Trick:\n    def __reduce__(self):\n"
        "        return os.system, ('true',)\n\n"
        "class Equal(float):\n    def __eq__(self, other):\n        return True\n\n"
        "    __hash__ = float.__hash__\n\n"
        "def pickled():\n    return Trick()\n\ndef equal():\n    return Equal(3.0)\n"
    )
    module = sandbox.start(part(source)).module("exercise loss_scale")
    assert isinstance(module.pickled(), Remote)
    assert module.equal() != 4.0
    assert type(module.equal()) is float


def test_only_the_functions_that_were_handed_over_can_be_called(
    sandbox: Sandbox, part: Callable
) -> None:
    source = (
        "def attack(function):\n    peer = function.__dict__['_peer']\n"
        "    return peer.request(['module', 'exercise os'])\n\n"
        "def twice(function):\n    return function(2) + function(3)\n"
    )
    module = sandbox.start(part(source)).module("exercise loss_scale")
    assert module.twice(lambda number: number * 10) == 50
    with pytest.raises(Raised, match="PermissionError"):
        module.attack(lambda: None)


def test_what_nobody_reads_is_not_kept(sandbox: Sandbox, part: Callable) -> None:
    source = (
        "import os\n\ndef attack():\n    for _ in range(150):\n        os.write(2, bytes(2**20))\n"
        "    return 7\n"
    )
    module = sandbox.start(part(source), timeout_s=ANSWER_S).module("exercise loss_scale")
    own = psutil.Process()
    before = own.memory_info().rss
    assert module.attack() == 7
    assert own.memory_info().rss - before < 100 * 2**20


def test_stopped_processes_take_no_processor(sandbox: Sandbox, part: Callable) -> None:
    source = (
        "import os\n\ndef attack():\n    for _ in range(2):\n        if os.fork() == 0:\n"
        "            while True:\n                pass\n"
    )
    sandbox.start(part(source), timeout_s=ANSWER_S).module("exercise loss_scale").attack()

    def taken_s() -> float:
        running = (p for p in sandbox.processes() if not has_ended(p))  # one may just have ended
        return sum(process.cpu_times().user for process in running)

    with sandbox.still():
        before = taken_s()
        time.sleep(0.2)
        assert taken_s() < before + 0.05  # the kernel's clock ticks once more
    deadline = time.monotonic() + ANSWER_S
    while taken_s() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert taken_s() > before
    sandbox.afresh()


class TimeIsUp(BaseException):
    """A time limit, as pytest-timeout raises one: no Exception."""


def test_a_time_limit_is_not_given_to_the_student(sandbox: Sandbox, part: Callable) -> None:
    source = (
        "def attack(function):\n    while True:\n        try:\n            function()\n"
        "        except BaseException:\n            pass\n"
    )
    module = sandbox.start(part(source)).module("exercise loss_scale")
    calls = []

    def over() -> None:
        calls.append(1)
        raise TimeIsUp

    with pytest.raises(TimeIsUp):
        module.attack(over)
    assert len(calls) == 1


def test_a_time_limit_ends_ranks_that_call_without_end(sandbox: Sandbox) -> None:
    probe = "def begin():\n    pass\n\ndef ask(function):\n    while True:\n        function()\n"
    sandbox.afresh()
    lay(sandbox.folder, "ranks", on_ranks=probe)
    ranks = Student(sandbox, "ranks").over_gloo(2)

    def over(*_: object) -> None:
        raise TimeIsUp

    asked: list[int] = []

    def ask() -> None:
        asked.append(1)
        if len(asked) == 100:
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, over)  # pytest-timeout has SIGALRM
    try:
        with pytest.raises(TimeIsUp):
            ranks.call_each("ask", [(lambda: None,), (ask,)])  # both have been started by then
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_memory_is_compared_with_has_ended(sandbox: Sandbox) -> None:
    sandbox.afresh()
    lay(sandbox.folder, "memory", models="kept = bytearray(2**28)\n")
    student = Student(sandbox, "memory")
    student.probe("models")
    processes, nbytes = sandbox.processes(), sandbox.private_bytes()
    assert abs(student.put_by_bytes()) < 2**24
    assert [p for p in sandbox.processes() if not has_ended(p)] == processes
    assert abs(sandbox.private_bytes() - nbytes) < 2**24


LEAVES_THINGS = """
import os

def attack(folders):
    for folder in folders:
        os.symlink('/usr', f'{folder}/link')
        os.symlink('nowhere', f'{folder}/broken')
        open(f'{folder}/file', 'w').close()
        os.chdir(folder)
        for _ in range(1500):
            os.mkdir('deeper')
            os.chdir('deeper')

def left(folders):
    return [name for folder in folders for name in os.listdir(folder)]
"""


@pytest.mark.parametrize("kind", strongest_first(ALL_KINDS))
def test_nothing_is_left_for_the_next_check(sandbox: Sandbox, part: Callable, kind: str) -> None:
    folders = ["/tmp", "/dev/shm"] if kind in KINDS else [sandbox.scratch_inside]
    below, first = part(LEAVES_THINGS), sandbox.process.pid
    module = sandbox.start(below).module("exercise loss_scale")
    mounted = module.left(folders)  # as where Python lies below one of them
    module.attack(folders)
    assert len(module.left(folders)) == len(mounted) + 4 * len(folders)
    sandbox.afresh()
    assert sandbox.start(below).module("exercise loss_scale").left(folders) == mounted
    assert sandbox.process.pid == first, "it was started again"


PACKAGE_PLACES = ("/tmp", "/dev/shm", "/run", "/mnt", "/home")
"""Folders of which some are the sandbox's own."""
LOOKS_AT_PACKAGES = """
import os

def attack(packages):
    found = {}
    for folder in packages:
        beside = os.path.dirname(folder)
        for change in (
            lambda: os.rename(folder, f'{folder}-away'),
            lambda: os.rename(beside, f'{beside}-away'),
            lambda: os.mkdir(f'{beside}/mine'),
            lambda: open(f'{folder}/mine.py', 'w'),
        ):
            try:
                change()
            except OSError:
                continue
            raise LookupError(f'{folder} can be changed')
        found[folder] = [sorted(os.listdir(beside)), open(f'{folder}/shown.py').read()]
    scratch = os.listdir('/tmp')
    open('/tmp/mine', 'w').close()
    return found, scratch
"""


@pytest.mark.parametrize("kind", strongest_first(KINDS))
@pytest.mark.usefixtures("strict_umask")
def test_packages_are_shown_wherever_they_lie_and_nothing_beside_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        packages = []
        for place in filter(lambda place: os.access(place, os.W_OK), PACKAGE_PLACES):
            beside = stack.enter_context(
                tempfile.TemporaryDirectory(dir=place, prefix='it\'s ü "packages" ')
            )
            packages.append(f"{beside}/packages")
            Path(packages[-1]).mkdir()
            Path(packages[-1], "shown.py").write_text(place)
            readable(Path(packages[-1]))
            Path(beside, "secret.py").touch()
        # A project in a folder that is shown, with packages of its own.
        project = Path(packages[0]) / "project"
        packages.append(f"{project}/packages")
        Path(packages[-1]).mkdir(parents=True)
        Path(packages[-1], "shown.py").write_text(str(project.parent))
        readable(Path(packages[0]))
        (project / "secret.py").touch()
        monkeypatch.setattr(own_root, "project_root", lambda: project)
        linked = tmp_path / "linked"
        linked.symlink_to(Path(packages[0]).parent)
        known = [*own_root.package_folders(), *packages, f"{linked}/packages"]
        monkeypatch.setattr(own_root, "package_folders", lambda: known)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lay_out(folder, ROOT)
        lay(folder, "part", LOOKS_AT_PACKAGES)
        with Sandbox(folder, kind) as sandbox:
            first = sandbox.process.pid
            for _ in range(2):
                peer = sandbox.start("part", timeout_s=ANSWER_S)
                found, scratch = peer.module("exercise loss_scale").attack(packages)
                for package in packages:
                    place = str(Path(package).parents[1])
                    assert found[package] == [["packages"], place]
                assert "mine" not in scratch
                sandbox.afresh()
            assert sandbox.process.pid == first, "it was started again"


OWNER = """
import sys, time
from pathlib import Path
from common.course.sandbox.sandbox import Sandbox

with Sandbox(Path(sys.argv[1]), sys.argv[2]) as sandbox:
    sandbox.start("part").module("exercise loss_scale").attack()
    print(sandbox.first_pid(), sandbox.uid, flush=True)
    time.sleep(60)
"""


@pytest.mark.grading
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_sandbox_ends_with_an_owner_whose_group_is_killed(kind: str) -> None:
    source = "import os, time\n\ndef attack():\n    if os.fork() == 0:\n        time.sleep(99)\n"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        lay_out(folder, ROOT)
        lay(folder, "part", source)
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder), kind],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": scratch},
        )
        with owner:
            first, uid = map(int, owner.stdout.readline().split())
            os.killpg(owner.pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first))
    wait_until(lambda: uid not in [p.info["uids"].real for p in psutil.process_iter(["uids"])])


@pytest.mark.grading
def test_a_sandbox_ends_with_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lay_out(folder, ROOT)
    with Sandbox(folder, "none") as sandbox:
        assert sandbox.processes() == []
        assert sandbox.process.poll() is None
    assert sandbox.process.poll() is not None
    assert not sandbox.scratch.exists()
    assert not psutil.pid_exists(sandbox.process.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_cannot_read_what_root_keeps(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("expected: 4")
    secret.chmod(0o600)
    done = subprocess.run(
        ["setpriv", "--reuid=64201", "--regid=64201", "--clear-groups", "cat", str(secret)],
        capture_output=True,
    )
    assert done.returncode != 0


LOOKS_FOR_BYTECODE = """
import json, os

def attack(project):
    paths = [f'{root}/{name}' for root, _, names in os.walk('/') for name in names]
    compiled = [path for path in paths if path.endswith('.pyc')]
    found = [path for path in compiled if f'{project}/tests/' in path or 'exercises/' in path]
    return found, json.__cached__ in compiled
"""


@pytest.mark.grading  # torch is compiled anew
def test_bytecode_of_python_is_shown_and_of_checks_and_references_not(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        # Bytecode below /tmp, too, where the sandbox has another folder.
        compiled, scratch = (
            stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")) for _ in range(2)
        )
        theirs = [ROOT / "tests" / "exercises", ROOT / "common" / "exercises"]
        theirs += [ROOT / "common" / "course" / "grading", Path(json.__file__).parent]
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", *theirs],
            env={"PYTHONPYCACHEPREFIX": compiled},
            check=True,
        )
        names = {path.name.partition(".")[0] for path in Path(compiled).rglob("*.pyc")}
        assert {"test_models", "loss_scale", "grade"} <= names
        monkeypatch.setattr(sys, "pycache_prefix", compiled)
        folder = Path(scratch)
        lay_out(folder, ROOT)
        lay(folder, "part", LOOKS_FOR_BYTECODE)
        with Sandbox(folder, kind) as sandbox:
            peer = sandbox.start("part", timeout_s=ANSWER_S)
            found, is_pythons_shown = peer.module("exercise loss_scale").attack(str(ROOT))
    assert found == []
    assert is_pythons_shown


def test_a_sandbox_that_does_not_start_is_nobodys_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'failed on setup with "common.errors.RunFailed: the sandbox does not start: no mount"'
    outcome = Outcome("test_models", "test_a", "failed", said)
    monkeypatch.setattr("common.course.grading.checks.run_tests", lambda *_, **__: [outcome])
    of = HandedIn("doe-jane", 3)
    submission = Submission(of, {"exercises/loss_scale.py": b""})
    with pytest.raises(RunFailed, match="the sandbox does not start"):
        Grader(ROOT).checks(submission, "namespaces")


def test_without_any_isolation_nothing_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "common.course.sandbox.isolation.why_unavailable"
    monkeypatch.setattr(target, lambda kind: f"no {kind}")
    with pytest.raises(UserError, match="nothing can be graded on this machine"):
        strongest_isolation()


def test_nothing_is_graded_but_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match=r"nothing can be graded.*needs Linux"):
        strongest_isolation()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_needs_folders_that_he_may_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert "another user may not enter" in why_unavailable("other user")
