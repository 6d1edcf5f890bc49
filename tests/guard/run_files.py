"""What runs leave behind: files, headers of tables, and the messages of tests of bad input."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
RUN_ID = re.compile(r"\d{8}-\d{6}[\w-]*")
"""A run's own name, which is another one on every run."""

UNSTABLE = (
    (re.compile(re.escape(str(PROJECT)) + r"/"), ""),
    (re.compile(re.escape(str(PROJECT)) + r"\b"), "PROJECT"),
    (re.compile(r"(/[\w.+-]+)*/pytest-of-[\w.-]+/pytest-\d+(/popen-gw\d+)?"), "TMP"),
    (re.compile(r"/tmp/[\w.-]+"), "TMP"),
    (re.compile(r"(TMP/\w*?)\d+\b"), r"\1"),
    (re.compile(r"\bslurm-\w{8}\b"), "slurm-NAME"),
    (re.compile(r"\bjob \d+"), "job N"),
    (re.compile(r"\d+(\.\d+)? (GB|GiB)\b|(at least) \d\.\d$"), "N GB"),
    (re.compile(r"(out of memory on )(?!NVIDIA).*?(?= with N GB)"), r"\1CPU"),
    (re.compile(r"-{4,}"), "---"),
    (re.compile(r"Expected one of \([^)]*\)"), "Expected one of them"),
    (RUN_ID, "RUN"),
    (re.compile(r"--port \d+: in use"), "--port PORT: in use"),
    (re.compile(r"\b127\.0\.0\.1(:\d+)?|\[::1\]:\d+"), "ADDRESS"),
    (re.compile(r"\(ADDRESS, \d+\)"), "ADDRESS"),
    (re.compile(r"\bpid \d+"), "pid N"),
)
"""What differs from run to run in a message, and what stands for it."""

MISTAKES = ("UserError: ", "error: ")
"""How the answers to bad input begin; how work broke off depends on who noticed it first."""


def stable(message: str) -> str:
    """Returns a message without what differs from run to run."""
    for pattern, name in UNSTABLE:
        message = pattern.sub(name, message)
    return message


def csv_headers(root: Path, pattern: str = "**/*.csv") -> str:
    """Returns a line for each distinct header below ``root``: file name, then columns."""
    headers = defaultdict(set)
    for path in root.glob(pattern):
        with path.open() as file:
            headers[RUN_ID.sub("RUN", path.name)].add(file.readline().strip())
    return "\n".join(
        f"{name}: {line}" for name in sorted(headers) for line in sorted(headers[name])
    )


def run_answers(root: Path) -> dict[str, str]:
    """Returns the files of the runs below ``root``, and the headers of their tables."""
    paths = [path for path in root.glob("assignment*/**/*") if path.is_file()]
    if not paths:
        raise SystemExit(f"{root}: no runs; make them with ddplab run --preset smoke")
    files = {RUN_ID.sub("RUN", str(path.relative_to(root))) for path in paths}
    kept = sorted(name for name in files if "__pycache__" not in name)
    headers = csv_headers(root, "assignment*/**/*.csv")
    return {"files.txt": "\n".join(kept), "headers.txt": headers}


def message_answers(folder: Path) -> dict[str, str]:
    """Returns, by file of tests, each test with the messages that answered its bad input."""
    by_test: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            test, message = json.loads(line)
            if message.startswith(MISTAKES):
                by_test[test].add(stable(message))
    if not by_test:
        raise SystemExit(f"{folder}: no messages; run pytest with GUARD_MESSAGES={folder}")
    texts = defaultdict(list)
    for test in sorted(by_test):
        file, _, name = test.partition("::")
        texts[file].append(f"{name}\n" + "".join(f"    {one}\n" for one in sorted(by_test[test])))
    return {
        f"{file.removesuffix('.py').replace('/', '-')}.txt": "".join(t) for file, t in texts.items()
    }
