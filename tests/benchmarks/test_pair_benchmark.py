"""pairs.py: the flags that the study of slow hosts gives it, and a table that cannot be written."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from refusal_support import refused_line

from common.benchmarks.pairs import PairBenchmark
from common.diagnose.studies import slow_hosts
from common.runtime.script import parse_settings
from common.runtime.stage_progress import StageProgress


class Parsed:
    """A series that runs nothing: it parses the flags and writes the table that they name."""

    def add(self, script: Path, *flags: object) -> None:
        assert script == slow_hosts.SCRIPT
        settings = parse_settings(PairBenchmark, [*map(str, flags)], "pairs")
        assert settings.device == "cpu"
        Path(settings.results).write_text(f"file\n{settings.results}\n")

    def wait(self, log: Path, on_output: object) -> None:
        pass


def test_the_study_of_slow_hosts_gives_flags_of_the_script_and_reads_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_hosts, "RUNS", slow_hosts.HOSTS)
    monkeypatch.setattr(slow_hosts, "launch_series", lambda *_, **__: nullcontext(Parsed()))
    monkeypatch.setattr(slow_hosts, "found_in", lambda samples, slowed: samples.iloc[0].to_dict())
    (tmp_path / "logs").mkdir()
    table = slow_hosts.run_slow_hosts(tmp_path, StageProgress())
    files = [str(tmp_path / "logs" / f"pairs-0-{run}.csv") for run in range(slow_hosts.HOSTS)]
    files += [str(tmp_path / "logs" / f"pairs-{slowed}-0.csv") for slowed in (1, 2, 3, 4)]
    assert table["file"].tolist() == files


def test_a_table_without_a_folder_is_refused_before_anything_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "none" / "pairs.csv"
    line = refused_line(slow_hosts.SCRIPT, "--device", "cpu", "--results", path)
    assert f"--results {path}: there is no folder {path.parent}" in line
