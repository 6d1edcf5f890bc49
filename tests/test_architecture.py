"""The rules of ARCHITECTURE.md that a machine can hold."""

import ast
import functools
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.xdist_group("architecture")  # each file is parsed once
ALLOWED = {
    "errors": set(),
    "settings": {"errors"},
    "runtime": {"errors", "settings", "samples", "tables", "judged", "machine_state"},
    "models": {"errors", "runtime", "perfmodel"},
    "data": {"errors", "settings", "runtime"},
    "tables": set(),
    "samples": set(),
    "judged": {"samples"},
    "machine_state": {"judged"},
    "csv_tables": {"errors"},
    "exercises": {"errors"},
    "perfmodel": {"csv_tables", "errors", "settings", "samples", "exercises"},
    "traces": {"errors", "exercises", "tables"},
    "analysis": {
        "planning",
        "judged",
        "machine_state",
        "csv_tables",
        "errors",
        "tables",
        "samples",
        "exercises",
        "perfmodel",
        "traces",
        "runtime",
    },
    "scheduling": {"errors", "settings", "runtime", "data", "exercises"},
    "training": {
        "errors",
        "settings",
        "samples",
        "exercises",
        "tables",
        "runtime",
        "models",
        "data",
        "perfmodel",
        "traces",
        "scheduling",
    },
    "benchmarks": {
        "judged",
        "csv_tables",
        "errors",
        "settings",
        "samples",
        "exercises",
        "tables",
        "traces",
        "runtime",
        "models",
        "data",
        "perfmodel",
        "analysis",
        "scheduling",
        "training",
    },
    "diagnose": {
        "settings",
        "judged",
        "machine_state",
        "csv_tables",
        "errors",
        "samples",
        "tables",
        "exercises",
        "perfmodel",
        "traces",
        "analysis",
        "runtime",
        "cluster",
    },
    "course": {
        "analysis",
        "errors",
        "judged",
        "samples",
        "exercises",
        "runtime",
        "perfmodel",
        "cluster",
    },
    "cluster": {"errors", "runtime"},
    "planning": {"errors", "judged", "samples", "runtime", "perfmodel"},
    "report": {
        "errors",
        "judged",
        "machine_state",
        "settings",
        "runtime",
        "cluster",
        "perfmodel",
        "analysis",
    },
    "tuning": {
        "planning",
        "models",
        "judged",
        "errors",
        "settings",
        "samples",
        "runtime",
        "cluster",
        "perfmodel",
        "analysis",
        "training",
        "benchmarks",
    },
    "studies": {
        "planning",
        "judged",
        "csv_tables",
        "tuning",
        "errors",
        "settings",
        "samples",
        "exercises",
        "runtime",
        "cluster",
        "perfmodel",
        "analysis",
        "report",
        "benchmarks",
        "training",
        "scheduling",
        "models",
        "data",
    },
    "explore": {
        "csv_tables",
        "errors",
        "settings",
        "runtime",
        "data",
        "perfmodel",
        "planning",
        "analysis",
        "scheduling",
    },
    "cli": {
        "course",
        "planning",
        "explore",
        "tuning",
        "studies",
        "errors",
        "runtime",
        "cluster",
        "perfmodel",
        "analysis",
        "report",
        "benchmarks",
        "data",
    },
}


CALLERS = {
    "diagnose": {"cli", "course", "analysis/scaling", "analysis/findings", "benchmarks/scaling"}
    | {"studies/exchange", "analysis/conclusions/text_scaling"},
    "course": {"cli"},
}
"""House → those outside it that call it: commands, and what belongs to assignment 4. The study of
the exchange diagnoses a script over it."""


READERS = {"cgroups", "files", "interfaces", "machine_cores", "marks", "nvml", "placement"}
"""Modules of the watch that read a machine and its clocks: the lab uses no others."""


@functools.cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Returns a file's imports, those in functions included."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path) -> set[str]:
    """Finds the modules that a file imports; with ``from`` also what it takes of them."""
    names: set[str] = set()
    for node in imports(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        else:
            names |= {alias.name for alias in node.names}
    return names


def imported_rooms(path: Path) -> set[str]:
    """Finds the rooms of common/ that a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("common.")}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_one_way(room: str) -> None:
    files = [ROOT / "common" / f"{room}.py", *(ROOT / "common" / room).glob("**/*.py")]
    for path in filter(Path.is_file, files):
        below = path.relative_to(ROOT / "common").as_posix()
        houses = {
            house for house, callers in CALLERS.items() if below.startswith((*callers, house))
        }
        assert imported_rooms(path) - {room} - houses <= ALLOWED[room] - set(CALLERS), path


def test_the_lab_uses_of_the_watch_its_readers_only() -> None:
    callers = ("diagnose", *CALLERS["diagnose"])
    for path in (ROOT / "common").rglob("*.py"):
        if path.relative_to(ROOT / "common").as_posix().startswith(callers):
            continue
        watch = [name for name in imported(path) if name.startswith("ddplab_watch")]
        assert {name.partition(".")[2].partition(".")[0] for name in watch} <= READERS, path


def test_every_room_has_a_rule() -> None:
    rooms = {path.parent.name for path in (ROOT / "common").glob("*/__init__.py")}
    assert rooms <= set(ALLOWED)


def test_the_watcher_needs_nothing_but_torch() -> None:
    # It is installed beside anybody's torch; psutil and pynvml are used where they are.
    usable = {*sys.stdlib_module_names, "torch", "psutil", "pynvml", "ddplab_watch"}
    for path in (ROOT / "common" / "diagnose" / "watch").rglob("*.py"):
        for node in imports(path):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if not node.level else []
            else:
                names = [alias.name for alias in node.names]
            assert {name.partition(".")[0] for name in names} <= usable, path


LAYERS = (
    ("architectures",),
    ("buckets", "collectives"),
    ("one_device", "ddp"),
    ("fsdp",),
    (
        *("model", "search", "samples", "tables", "layer_tables", "published"),
        *("printed",),
        *("calibration", "uncertainty", "whatif", "expected_error", "perfetto_trace"),
    ),
    ("cluster", "scaling", "replay"),
)
"""The files and packages of ``perfmodel``, from those that import none of the others upwards."""


def test_the_model_is_built_in_layers() -> None:
    floors = {name: floor for floor, layer in enumerate(LAYERS) for name in layer}
    for path in (ROOT / "common" / "perfmodel").rglob("*.py"):
        name = path.relative_to(ROOT / "common" / "perfmodel").parts[0].removesuffix(".py")
        taken = {
            node.module.split(".")[2]
            for node in imports(path)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common.perfm")
        }
        for other in taken - {name}:
            within = floors[other] == floors[name] and path.parent.name == "perfmodel"
            assert floors[other] < floors[name] or within, f"{path} imports {other}"


ENGINE = {
    *("fastest_cap", "step_timeline"),
    *("advance", "many_cases", "one_after_another", "without_contention"),
}
"""What ``perfmodel/model.py`` predicts with."""


def test_outside_of_its_room_predictions_come_from_the_model() -> None:
    for path in (ROOT / "common").glob("*/*.py"):
        if path.parent.name == "perfmodel":
            continue
        taken = {
            alias.name
            for node in imports(path)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common.perf")
            for alias in node.names
        }
        assert not taken & ENGINE, path


LEAVES = ("perfmodel", "planning", "traces", "analysis", "explore")
WITHOUT_TORCH = [
    "common.cli.main",
    "common.tables",
    "common.samples",
    "common.judged",
    "common.machine_state",
    "common.scheduling.partition",
    "common.scheduling.modes",
    "common.data.text_lengths",
    *(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in LEAVES
        for path in sorted((ROOT / "common" / room).rglob("*.py"))
        if path.name != "__init__.py"
    ),
]


@pytest.mark.slow  # six seconds
def test_predicting_and_reading_do_not_import_torch() -> None:
    # One after another in one interpreter: the first that imports torch shows itself and the rest.
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name); "
    code += "print(name) if 'torch' in sys.modules else None"
    command = [sys.executable, "-c", code, *WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("script", sorted((ROOT / "assignments").glob("*/*.py")), ids=str)
def test_scripts_hold_no_logic(script: Path) -> None:
    # A script parses flags and calls one function: no definitions, loops or branches but main's.
    tree = ast.parse(script.read_text())
    logic = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.With, ast.Try)
    assert not [node for node in ast.walk(tree) if isinstance(node, logic)]


def test_no_module_hides_one_of_the_standard_library_from_a_script() -> None:
    # The self-test is started by its path, so its folder comes first where modules are looked for.
    names = {path.stem for path in (ROOT / "common" / "benchmarks").glob("*.py")}
    assert names & sys.stdlib_module_names <= {"__init__"}


def test_no_two_files_of_tests_have_one_name() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.slow  # six seconds
def test_the_house_keeps_its_shape() -> None:
    path = ROOT / "tests" / "guard" / "counts.py"
    counted = runpy.run_path(str(path))["counts"](ROOT)
    most = {
        "circles of modules": 0,
        "packages over 15 files": 3,
        "docstrings that point": 0,
        "pronouns as names": 100,
        "DdpModel( sites": 2,
        "functions of 8 arguments or more": 3,
        "group-bys of the slowest rank": 3,
        "functions …_shown, _facts, _table, _text": 80,
    }
    assert {name: counted[name] for name, limit in most.items() if counted[name] > limit} == {}
