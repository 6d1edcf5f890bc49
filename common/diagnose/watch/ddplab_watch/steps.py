"""The parts of a step, told from what a loop calls, whatever the loop looks like.

A training loop fetches batches, runs a model forward and backward, and updates. What lies between
two updates is a *segment*. A segment begins a new step unless it belongs to the step before it, as
the generator's half of a GAN does: it fetched nothing, and its optimizer has not updated in this
step yet. Micro-batches need no rule: an update ends what several passes began.

    data       from the step's first fetch to its forward pass, and from a backward to the next
    forward    from the call of the model to the call of backward(), the loss included
    buffers    of it, what DDP takes to send rank 0's buffers to all ranks before its model runs
    backward   until backward() returns: computation and what is left of the exchange
    optimizer  from there to the end of the update: clipping, unscaling, update
    between    from one update to the first fetch of the next step: logging, evaluation

Fetches of another loader, and passes without gradients, are evaluation and lie between.

A loop may rest: then hooks return at once, and only updates are counted. A loop of several
optimizers, or of several updates in a step, may not, as other calls tell which of them ends a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ddplab_watch.buckets import Bucket
from ddplab_watch.marks import Clock, Mark

RESTING = "training"
"""The phase of a loop that rests."""


@dataclass
class Fetch:
    """A batch that was fetched: by which loader, when, and which samples."""

    loader: int
    began: Mark | None
    began_s: float
    ended_s: float
    ended: Mark | None = None
    epoch: int = 0
    identities: list[int] | None = None
    is_hashed: bool = False
    checksums: list[list[int]] = field(default_factory=list)
    """Checksums of some of the samples; see ``batches``."""


@dataclass
class Pass:
    """A forward pass and the backward pass that followed it, as marks."""

    fetched: Mark
    """Start of its data time: a fetch, or the end of the backward pass before."""
    forward: Mark
    forward_s: float
    """On the host's clock."""
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    longest: int = 0
    elements: int = 0
    sending: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Marks of calls of DDP that sent buffers, and of the model inside, which runs after that."""
    backward: Mark | None = None
    ended: Mark | None = None
    ready: Mark | None = None
    """Mark at which this rank's last gradient was ready; None where nobody watched."""


@dataclass
class Segment:
    """Holds what was seen since the update before."""

    fetches: list[Fetch] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    evaluation_s: float = 0.0
    evaluated: int = 0
    first_fetch: int = 0
    """Index of the first fetch after the last pass without gradients."""

    def of_training(self) -> list[Fetch]:
        """Returns the fetches that feed the training: those of the loader that fetched last."""
        after = self.fetches[self.first_fetch :]
        return [fetch for fetch in after if fetch.loader == after[-1].loader]


@dataclass
class Step:
    """A step that has ended; see the module for what its parts are.

    Attributes:
        began, ended: marks.
        began_s, ended_s: the same on the host's clock, and ``cpu_s`` the processor time between.
        updates: marks of (end of backward, end of update), one for each optimizer.
        optimizers: optimizers that updated, by identity.
        skipped: True where a gradient scaler left the update out.
        watched: gradients and buckets were watched; ``buckets`` are those that were sent.
        profiled: True where the step's time is also the profiler's.
        between_windows: only what the long watch needs is known of it.
        before_probes: the watch measured something between this step and the next.
        untimed: steps in which the loop rested, between this one and the timed one before.
        since: mark of the end of the newest untimed step; None where there is none.
        counts: further columns of its row.
    """

    began: Mark
    began_s: float
    passes: list[Pass]
    fetches: list[Fetch]
    evaluation_s: float
    cpu_began_s: float
    ended: Mark | None = None
    ended_s: float = 0.0
    cpu_s: float = 0.0
    updates: list[tuple[Mark, Mark]] = field(default_factory=list)
    optimizers: set[int] = field(default_factory=set)
    skipped: bool = False
    watched: bool = False
    profiled: bool = False
    between_windows: bool = False
    before_probes: bool = False
    untimed: int = 0
    since: Mark | None = None
    buckets: list[Bucket] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)


class Loop:
    """Finds steps among the calls of a loop. One thread calls it; ``phase`` may be read by others.

    Args:
        clock: clock of the device that computes.
        host_s, cpu_s: functions that return the seconds of the host and of the process.
    """

    def __init__(
        self, clock: Clock, host_s: Callable[[], float], cpu_s: Callable[[], float]
    ) -> None:
        self.clock, self.host_s, self.cpu_s = clock, host_s, cpu_s
        self.phase = "between"
        self.segment = Segment()
        self.may_rest = True
        """False once a step had several updates, one had no pass, or another optimizer updated."""
        self.is_resting = False
        self.untimed = 0
        """Steps in which the loop rested, after the newest timed step."""
        self._woken: Mark | None = None
        """Mark of the end of the newest untimed step."""
        self.sees_calls = False
        """True once calls of the model are told of: a backward pass without one is a second one."""
        self.step: Step | None = None
        """Step that the next segment may still belong to."""
        self.ended: list[Step] = []
        self.current: Pass | None = None
        self._optimizers: set[int] = set()
        """Optimizers of all steps, by identity."""
        self._called: Mark | None = None
        """Mark of the last call of the model."""
        self._cpu_began_s = cpu_s()

    def fetch_began(self) -> tuple[Mark, float]:
        """Notes that a loader is asked for a batch; returns the moment, for ``fetch_ended``."""
        self.phase = "data"
        if not self.segment.fetches and not self.segment.passes:
            self._cpu_began_s = self.cpu_s()
        return self.clock.mark(), self.host_s()

    def fetch_ended(self, began: tuple[Mark, float], fetch: Fetch) -> None:
        """Notes a batch."""
        fetch.began, fetch.began_s = began
        fetch.ended, fetch.ended_s = self.clock.mark(), self.host_s()
        self.segment.fetches.append(fetch)
        self.phase = "between"

    def forward_began(self, **counts: int) -> None:
        """Notes that the model is called for training."""
        self.phase = "forward"
        mark = self._called = self.clock.mark()
        if self.current is not None and self.current.backward is None:
            for name, value in counts.items():  # a second call before one backward pass
                setattr(self.current, name, getattr(self.current, name) + value)
            return
        passes, fetches = self.segment.passes, self.segment.fetches
        since = mark
        if passes and passes[-1].ended is not None:
            since = passes[-1].ended
        elif fetches[self.segment.first_fetch :]:
            since = self.segment.of_training()[0].began
        elif not passes:
            self._cpu_began_s = self.cpu_s()
        self.current = Pass(since, mark, self.host_s(), **counts)
        passes.append(self.current)

    def buffers_sent(self) -> None:
        """Notes that DDP has sent its buffers since it was called: the model inside of it runs."""
        if self.current is not None:
            self.current.sending.append((self._called, self.clock.mark()))

    def evaluated(self, seconds: float) -> None:
        """Notes a pass without gradients: what was fetched for it is no step's."""
        segment = self.segment
        segment.evaluation_s += seconds
        segment.evaluated += 1
        if not segment.passes:
            segment.first_fetch = len(segment.fetches)
        self.phase = "between"

    def backward_began(self) -> None:
        """Notes that backward() is called."""
        if self.current is None:
            passes = self.segment.passes
            if self.sees_calls and passes:  # a second loss of the same call
                self.current = passes[-1]
            else:  # the model's call was not seen
                self.forward_began()
        self.phase = "backward"
        if self.current.backward is None:
            self.current.backward = self.clock.mark()

    def backward_ended(self) -> None:
        """Notes that backward() has returned; the last of a pass counts."""
        self.phase = "optimizer"
        if self.current is not None:
            self.current.ended = self.clock.mark()
            self.current = None

    def update_ended(self, optimizer: int, skipped: bool = False) -> None:
        """Notes that an optimizer has updated, or that a gradient scaler left it out."""
        segment, self.segment, self.current = self.segment, Segment(), None
        passes = [pass_ for pass_ in segment.passes if pass_.ended is not None]
        if not passes and (self.step is None or optimizer in self.step.optimizers):
            self.may_rest &= not self._optimizers
            return  # an update without a backward pass, such as one of averaged weights
        fetches = segment.of_training() if segment.fetches[segment.first_fetch :] else []
        is_new = self.step is None or fetches or optimizer in self.step.optimizers
        if is_new:
            self.finish()
            # A loop that loads ahead fetches the next batch after its forward pass.
            starts = [(fetch.began_s, fetch.began) for fetch in fetches[:1]]
            starts += [(pass_.forward_s, pass_.forward) for pass_ in passes[:1]]
            began_s, began = min(starts, key=lambda start: start[0])
            self.step = Step(
                began=began,
                began_s=began_s,
                passes=passes,
                fetches=fetches,
                evaluation_s=segment.evaluation_s,
                cpu_began_s=self._cpu_began_s,
                untimed=self.untimed,
                since=self._woken,
            )
            self.untimed, self._woken = 0, None
        else:
            self.step.passes += passes
        step, end = self.step, self.clock.mark()
        step.updates.append((passes[-1].ended if passes else end, end))
        step.ended, step.ended_s = end, self.host_s()
        step.cpu_s = self.cpu_s() - step.cpu_began_s
        step.optimizers.add(optimizer)
        self._optimizers.add(optimizer)
        step.skipped |= skipped
        self._cpu_began_s = self.cpu_s()
        self.phase = "between"

    def finish(self) -> None:
        """Ends the step that the next segment might have belonged to."""
        if self.step is not None:
            self.may_rest &= len(self._optimizers) == len(self.step.updates) == 1
            self.ended.append(self.step)
            self.step = None

    def rest(self) -> None:
        """Begins to rest, after an update, if it may."""
        if self.may_rest:
            self.finish()
            self.is_resting, self.phase = True, RESTING

    def rested(self, optimizer: int) -> bool:
        """Notes an update while resting; returns True if it ended a step."""
        if optimizer not in self._optimizers:
            self.may_rest = False
            return False
        self.untimed += 1
        return True

    def wake(self) -> None:
        """Rests no longer."""
        self.is_resting, self.phase = False, "between"
        self._woken = self.clock.mark()
        self._cpu_began_s = self.cpu_s()
