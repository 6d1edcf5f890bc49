"""The stages of a watch, from one update to the next, up to the end of its window.

warmup + window     steps as they are; only moments are noted
bucket_steps        gradients and buckets, too, and how often the host waits for its GPU
profile_steps       of a model that hooks cannot see into: under torch.profiler
then                probes
with ``to_end``     medians of blocks of steps, and after each change window and bucket_steps anew
"""

from __future__ import annotations

from torch.optim import Optimizer

from ddplab_watch import host_waits, torch_internals
from ddplab_watch.buckets import BucketWatch
from ddplab_watch.host_waits import HostWaits
from ddplab_watch.long_watch import LongWatch
from ddplab_watch.machine_cores import read_cpu_times
from ddplab_watch.profile import ShortProfile
from ddplab_watch.session import Session
from ddplab_watch.steps import Step

MOST_PLACES = 50
"""Lines at which the host waits for its GPU."""


class Stages:
    """The stage that a watch is in, and the way to the next."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.cpu_times = read_cpu_times()
        self.buckets: BucketWatch | None = None
        self.waits: HostWaits | None = None
        self.profile: ShortProfile | None = None
        self.long: LongWatch | None = None
        """None until the first window is over."""
        self.rests_until = 0
        """Number of the step before which a resting loop wakes."""

    def backward_began(self) -> None:
        """Notes that backward() is called."""
        self.session.loop.backward_began()
        if self.buckets is not None:
            self.buckets.begin()

    def backward_ended(self) -> None:
        """Notes that backward() has returned."""
        newest = self.session.loop.current
        self.session.loop.backward_ended()
        if self.buckets is not None and newest is not None:
            newest.ready = self.buckets.ready

    def update_ended(self, optimizer: Optimizer, skipped: bool) -> bool:
        """Notes an update; between two stages, goes to the next. Returns True after the last."""
        session, options, loop = self.session, self.session.options, self.session.loop
        if loop.is_resting:
            self.rested(optimizer)
            return False
        brief = session.calls.brief
        if not brief and (
            session.updated <= options.warmup or session.updated + 1 >= options.last_step
        ):
            groups = optimizer.param_groups
            session.updated_parameters.update(id(p) for group in groups for p in group["params"])
        before = loop.step
        loop.update_ended(id(optimizer), skipped)
        session.steps.collect()
        step = loop.step
        if step is None or step is before:
            return False
        session.updated += 1
        if brief:
            step.between_windows = True
            self.go_on()
            return False
        return self.window_step_ended(step)

    def rested(self, optimizer: Optimizer) -> None:
        """Notes an update while the loop rests; lets it go on where a step is to be timed."""
        session, loop = self.session, self.session.loop
        session.updated += loop.rested(id(optimizer))
        if session.next_step < self.rests_until and loop.may_rest:
            return
        loop.wake()
        self.go_on()

    def go_on(self) -> None:
        """Between windows, rests before a step that is not timed; else may begin a window."""
        session = self.session
        number = session.next_step
        self.rests_until = self.long.next_timed(number)
        if self.rests_until > number:
            session.loop.rest()
            session.steps.collect()  # soon, as other ranks wait for this one's block to be judged
        elif self.long.begins_window(number):
            self.begin_window()

    def begin_window(self) -> None:
        """Begins a window without a warm-up, after a change."""
        session = self.session
        session.began_window = session.updated - session.options.warmup
        session.record.window += 1
        session.look_less(False)
        session.stacks.counting = True
        session.pauses.taken()
        self.cpu_times = read_cpu_times()

    def end_window(self) -> bool:
        """Goes on after a window and its probes; returns True where the watch is over."""
        session, options = self.session, self.session.options
        if not options.to_end:
            return True
        session.look_less(True)
        session.loop.step.before_probes = True
        if self.long is not None:
            self.long.resume(session.next_step)
            return False
        session.stacks.is_training = True
        store = torch_internals.job_store() if session.ranks > 1 else None
        if session.ranks > 1 and store is None:
            session.record.unseen("changes while it runs", "the ranks' store is not known")
        self.long = session.steps.long = LongWatch(
            record=session.record,
            ranks=(session.rank, session.ranks),
            store=store,
            resident_bytes=lambda: session.memory.read()["resident_bytes"],
            first=session.next_step,
            usual_s=session.steps.usual_s(),
        )
        return False

    def window_step_ended(self, step: Step) -> bool:
        """Notes a step of a window; returns True where the watch is over."""
        session, options = self.session, self.session.options
        at = session.updated - session.began_window
        step.watched = self.buckets is not None
        step.counts = session.pauses.taken() | session.memory.read()
        if self.waits is not None:
            step.counts["host_waits"] = self.waits.taken()
        if at == options.warmup:
            session.stacks.counting = True
        if at == options.warmup + options.window:
            session.stacks.counting = False
            session.stacks.flush()
            session.look_around(self.cpu_times)
            if options.bucket_steps:
                self.watch_buckets()
                self.count_waits()
        step.profiled = at > options.last_step
        if self.buckets is not None:
            step.buckets = self.buckets.taken()
        if at < options.last_step:
            return False
        self.unwatch_buckets()
        self.stop_counting_waits()
        return (session.began_window > 0 or self.profile_or_probe()) and self.end_window()

    def watch_buckets(self) -> None:
        """Begins to watch gradients and buckets."""
        session = self.session
        if not session.roots or session.is_sharded():
            why = "FSDP has none" if session.roots else "no module was found"
            session.record.unseen("buckets", why)
            return
        self.buckets = BucketWatch(session.roots[0], session.loop.clock)
        self.buckets.install()
        if self.buckets.unseen:
            session.record.unseen("buckets", self.buckets.unseen)

    def unwatch_buckets(self) -> None:
        """Takes the watch off gradients and buckets."""
        if self.buckets is not None:
            self.buckets.remove()
            self.buckets = None

    def count_waits(self) -> None:
        """Begins to count how often the host waits for its GPU."""
        session = self.session
        if not host_waits.can_be_counted(session.device):
            return
        waits = HostWaits(session.phase, session.stacks.named)
        waits.install()
        if waits.unseen:
            session.record.unseen("waits of the host for the GPU", waits.unseen)
        else:
            self.waits = waits

    def stop_counting_waits(self) -> None:
        """Stops counting, and records where the host waited."""
        if self.waits is None:
            return
        self.waits.remove()
        for (phase, line, call), count in self.waits.places.most_common(MOST_PLACES):
            row = {"phase": phase, "place": line, "call": call, "waits": count}
            self.session.record.add("host-waits", **row)
        self.waits = None

    def profile_or_probe(self) -> bool:
        """Goes on with the profile of a model that hooks cannot see into; then probes.

        Returns True after the probes.
        """
        session = self.session
        further = session.updated - session.options.last_step
        if further == 0 and session.profiled_steps:
            self.profile = ShortProfile(session.device)
            self.profile.start()
            return False
        if further < session.profiled_steps:
            self.profile.begin_step(session.updated)
            return False
        self.end_profile()
        if session.options.probe:
            from ddplab_watch.after_window import probe  # in no step that is timed

            session.stacks.is_training = False
            session.loop.is_resting = True  # passes of the probes are no step's
            try:
                probe(session)
            finally:
                session.loop.is_resting = False
        return True

    def end_profile(self, unless_written: str = "") -> None:
        """Writes what was profiled into the bundle, or gives it up and says why."""
        if self.profile is None:
            return
        session, profile, self.profile = self.session, self.profile, None
        if unless_written:
            profile.give_up(unless_written)
        else:
            session.stacks.is_training = False  # a large trace takes seconds
            path = session.record.path
            profile.write(path.with_name(f"{path.stem}-trace.json.gz"), session.rank)
        if profile.unseen:
            session.record.unseen("operators", profile.unseen)

    def end(self) -> None:
        """Ends whatever stage there is."""
        self.unwatch_buckets()
        self.stop_counting_waits()
        self.end_profile("the script ended before")
