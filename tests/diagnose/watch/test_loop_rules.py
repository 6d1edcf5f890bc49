"""Which calls make a step, told with a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ddplab_watch import rows
from ddplab_watch.steps import Fetch, Loop


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


class Script:
    """A training loop's calls, each of which takes a second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.loop = Loop(self.clock, lambda: self.clock.now, lambda: self.clock.now)

    def tick(self) -> None:
        self.clock.now += 1.0

    def fetch(self, loader: int = 1) -> None:
        moment = self.loop.fetch_began()
        self.tick()
        self.loop.fetch_ended(moment, Fetch(loader, None, 0.0, 0.0))

    def passes(self, backward: bool = True) -> None:
        self.loop.forward_began(samples=4)
        self.tick()
        if backward:
            self.loop.backward_began()
            self.tick()
            self.loop.backward_ended()

    def update(self, optimizer: int = 1, skipped: bool = False) -> None:
        self.tick()
        self.loop.update_ended(optimizer, skipped)

    def step(self, skipped: bool = False) -> None:
        self.fetch()
        self.passes()
        self.update(skipped=skipped)

    def steps(self) -> list:
        self.loop.finish()
        return self.loop.ended


@pytest.fixture
def script() -> Script:
    return Script()


def test_a_plain_loop(script: Script) -> None:
    for _ in range(3):
        script.step()
        script.tick()  # logging
    steps = script.steps()
    assert [(s.began, s.ended) for s in steps] == [(0, 4), (5, 9), (10, 14)]
    assert [p.samples for s in steps for p in s.passes] == [4, 4, 4]


def test_micro_batches_belong_to_one_step(script: Script) -> None:
    for _ in range(2):
        for _ in range(3):
            script.fetch()
            script.passes()
        script.update()
    steps = script.steps()
    assert [len(s.passes) for s in steps] == [3, 3]
    assert [len(s.fetches) for s in steps] == [3, 3]
    # The second fetch counts as data of its pass: from one backward pass to the next forward.
    assert steps[0].passes[1].forward - steps[0].passes[1].fetched == 1


def test_a_fetch_is_told_from_what_comes_between_it_and_the_forward_pass(script: Script) -> None:
    """Two seconds of copying follow a fetch; a loop that shows no fetch has data alone."""
    for shows_fetches in (True, False):
        for _ in range(2):
            if shows_fetches:
                script.fetch()
                script.tick()
                script.tick()
            script.passes()
            script.tick()
            script.passes()  # a micro-batch a second after the first one's backward pass
            script.update()
    shown, _, hidden, _ = (rows.phases(step, script.clock, None) for step in script.steps())
    assert (shown["data"], shown["copy"]) == (1000.0, 3000.0)
    assert (hidden["data"], hidden["copy"]) == (1000.0, 0.0)


def test_batches_fetched_ahead_of_several_passes(script: Script) -> None:
    for _ in range(2):
        script.fetch()
        script.fetch()
        script.passes()
        script.passes()
        script.update()
    assert [len(s.passes) for s in script.steps()] == [2, 2]


def test_two_optimizers_of_one_batch_make_one_step(script: Script) -> None:
    for _ in range(3):
        script.fetch()
        script.passes()
        script.update(optimizer=1)
        script.passes()
        script.update(optimizer=2)
    steps = script.steps()
    assert [len(s.updates) for s in steps] == [2, 2, 2]
    assert [s.ended - s.began for s in steps] == [7, 7, 7]


def test_a_loop_without_a_loader(script: Script) -> None:
    for _ in range(3):
        script.passes()
        script.update()
        script.tick()
    assert [(s.began, s.ended) for s in script.steps()] == [(0, 3), (4, 7), (8, 11)]


def test_the_last_batch_may_have_been_fetched_ahead(script: Script) -> None:
    script.fetch()
    script.step()
    script.passes()  # of the batch that was fetched before
    script.update()
    assert len(script.steps()) == 2


def test_what_is_fetched_and_run_for_an_evaluation_is_no_step(script: Script) -> None:
    script.step()
    for _ in range(5):
        script.fetch(loader=2)
        script.loop.evaluated(1.0)
    script.step()
    steps = script.steps()
    assert [s.evaluation_s for s in steps] == [0, 5]
    assert [len(s.fetches) for s in steps] == [1, 1]
    assert steps[1].began == 9  # after the evaluation's five fetches


def test_an_evaluation_between_a_fetch_and_its_pass_ends_nothing(script: Script) -> None:
    for _ in range(2):
        script.fetch()
        script.loop.evaluated(1.0)  # as where every so many batches begin with a validation
        script.passes()
        script.update()
    first, second = script.steps()
    assert (first.began, second.began) == (1.0, 5.0)  # with the forward passes
    assert first.evaluation_s == 1.0


def test_a_step_that_the_scaler_left_out_is_one(script: Script) -> None:
    for skipped in (False, True, False):
        script.step(skipped=skipped)
    assert [s.skipped for s in script.steps()] == [False, True, False]


def test_an_update_without_a_backward_pass_is_none(script: Script) -> None:
    script.step()
    script.update()  # of averaged weights, by the same optimizer
    assert len(script.steps()) == 1


def test_several_calls_before_one_backward_pass_are_one_pass(script: Script) -> None:
    script.fetch()
    script.passes(backward=False)
    script.passes()
    script.update()
    [step] = script.steps()
    assert [p.samples for p in step.passes] == [8]


def test_sending_buffers_is_no_forward_pass(script: Script) -> None:
    script.fetch()
    for _ in range(2):  # of two calls before one backward pass, each sends them
        script.loop.forward_began(samples=4)
        script.tick()
        script.loop.buffers_sent()
        script.tick()
        script.tick()
    script.loop.backward_began()
    script.tick()
    script.loop.backward_ended()
    script.update()
    [step] = script.steps()
    row = rows.row_of_step(step, script.clock, epoch=0)
    assert (row["buffers_time_ms"], row["forward_time_ms"]) == (2000, 4000)
    parts = ("data", "buffers", "forward", "backward", "optimizer")
    assert sum(row[f"{part}_time_ms"] for part in parts) == row["step_time_ms"]


def loop_of_micro_batches(script: Script) -> None:
    for _ in range(2):
        script.fetch()
        script.passes()
    script.update()


def loop_that_loads_ahead(script: Script) -> None:
    script.passes()
    script.fetch()
    script.update()


@pytest.mark.parametrize("one_step", [Script.step, loop_of_micro_batches, loop_that_loads_ahead])
def test_steps_between_rests_are_as_all_are(one_step: Callable[[Script], None]) -> None:
    def rows_of(script: Script) -> list[tuple[int, dict]]:
        steps, number, before, numbered = script.steps(), 0, None, []
        for step in steps:
            number += step.untimed
            since = before if step.since is None else step.since
            numbered.append((number, rows.phases(step, script.clock, since)))
            number, before = number + 1, step.ended
        return numbered

    watched, rested = Script(), Script()
    for number in range(12):
        one_step(watched)
        if not number % 3:
            one_step(rested)
            rested.loop.rest()
            continue
        rested.clock.now = watched.clock.now
        assert rested.loop.rested(1)
        if number % 3 == 2:
            rested.loop.wake()
    assert rows_of(rested) == rows_of(watched)[::3]
    assert rested.loop.untimed == 2  # since the last step that was timed


def test_a_loop_may_not_rest_where_another_optimizer_may_end_a_step(script: Script) -> None:
    script.step()
    assert not script.loop.rested(2)
    assert not script.loop.may_rest


def test_a_loop_of_several_updates_may_not_rest(script: Script) -> None:
    script.step()
    script.passes()
    script.update(optimizer=2)
    script.step()
    assert not script.loop.may_rest
