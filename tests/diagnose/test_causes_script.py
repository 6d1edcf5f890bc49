"""Causes in a script itself, from made-up runs whose answer is known."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from scaling_evidence import MadeUp, as_watched, change_table, made_verdict, verdict_on, verdicts_on

from common.tables import STACK_COLUMNS

MODULE = "torch.nn.modules.module._wrapped_call_impl"
WAITING = "torch.distributed.distributed_c10d.barrier"


@pytest.mark.parametrize(
    ("between_ms", "collecting_ms", "lost"),
    [
        (0.0, 10.0, 0.25),  # both ranks at once
        (0.0, lambda steps: 10.0 * ((steps["step"] + steps["rank"]) % 2), 0.25),  # in turns
        (160.0, 160.0, 0.8),  # after each step
    ],
)
def test_a_collection_on_one_rank_stops_all(tmp_path, between_ms, collecting_ms, lost) -> None:
    folder = as_watched(MadeUp(noise=0.0).write(tmp_path / "run"))
    times_ms = {"between_time_ms": between_ms, "collecting_time_ms": collecting_ms}
    verdict = verdict_on(change_table(folder, step_time_ms=40.0, **times_ms), "garbage-collection")
    assert verdict.lost_share == pytest.approx(lost)
    assert verdict.predicted_speedup / verdict.speedup_now == pytest.approx(1 / (1 - lost))


@pytest.mark.parametrize(
    ("phase", "call", "between_ms", "title"),
    [
        ("evaluation", MODULE, (30, 0), "rank 0 evaluates (train.py:31)"),
        ("between", MODULE, (30, 0), "rank 0 calls a model without training it (train.py:31)"),
        ("between", MODULE, (30, 30), "every rank calls a model without training it (train.py:31)"),
        (
            "between",
            "torch.serialization.save",
            (30, 0),
            "rank 0 writes a checkpoint (train.py:31)",
        ),
        ("between", "", (30, 30), "every rank does other work (train.py:31)"),
        ("evaluation", "x.call", (30, 31), "rank 0 evaluates (train.py:31) while"),  # 1 waits for 0
    ],
)
def test_work_between_steps_has_its_name_and_line(
    tmp_path: Path, phase: str, call: str, between_ms: tuple[int, int], title: str
) -> None:
    folder = as_watched(MadeUp(noise=0.0).write(tmp_path / "run"))
    between = dict(enumerate(between_ms))
    change_table(folder, between_time_ms=lambda steps: steps["rank"].map(between))
    rows = [(0, phase, "/my code/train.py:31 validate", call, 60), (0, phase, "/a.py:1 f", "", 50)]
    rows += [(1, "between", "/my code/train.py:40 main", WAITING, 60)] * (between_ms == (30, 31))
    stacks = pd.DataFrame(rows, columns=STACK_COLUMNS)
    stacks.to_csv(folder / "stacks.csv", index=False)
    first = verdict_on(folder, "evaluation-or-logging")
    assert first.title.startswith(title)
    latest = between_ms.index(max(between_ms))
    sentence = f"From one step of rank {latest} to its next {max(between_ms)} ms pass"
    assert first.evidence[0].startswith(sentence)
    # Rollouts of a policy are no waste, and all ranks make them.
    assert (first.confidence == "low") == ("every rank calls" in title)


def test_what_lies_between_steps_is_compared_with_what_lies_in_them_by_its_time(
    tmp_path: Path,
) -> None:
    """45 ms between steps, 42 % of the time; rank 1 takes 30 of a step of 63.2, 47 %."""
    run = MadeUp(noise=0.0, slow={1: 2.0}, between_ms=45.0)
    causes = [*verdicts_on(run.write(tmp_path / "run"))]
    assert causes == ["evaluation-or-logging", "slow-rank"]


def test_a_script_that_compiles_in_each_step_has_none_to_compare_with(tmp_path: Path) -> None:
    folder = as_watched(MadeUp().write(tmp_path / "run"))
    verdict = verdict_on(change_table(folder, recompilations=1), "recompilation")
    assert "30 graphs" in verdict.evidence[0]
    assert "nan" not in verdict.evidence[0]


def test_no_cause_takes_more_than_the_step() -> None:
    verdict = made_verdict("slow-rank", 1.95)
    assert verdict.lost_share == 1.0
