"""A model without computation: its backward pass sleeps until each recorded gradient is ready.

Under real DDP it behaves like a GPU that computes while the CPU only communicates, so that several
ranks can share a core and still overlap communication with what they would compute. Every gradient
waits for its own moment since the start of the backward pass, so that errors do not add up, and
handing it over costs no copy. Autograd's work before the first gradient and DDP's work between two
gradients (copying one into its bucket) take place during the sleeps, as long as these are long
enough; ``lateness_s`` tells when they were not.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.perfmodel.ddp.profile import BackwardProfile

BYTES_PER_ELEMENT = 4
CALIBRATION_PASSES = 15
CALIBRATION_SLEEP_S = 0.5e-3


class ReplayModel(nn.Module):
    """A parameter for each gradient of a recorded backward pass, of the same name and size.

    The parameters are registered as in the recording (where that is not known, in reverse order
    of readiness, as in GPT-2). ``handed_s`` and ``ended_s`` are times of the latest backward pass,
    in seconds from its start: when each gradient, in order of readiness, was handed to autograd,
    and when the pass ended.

    Needs about twice the gradients' bytes, and as much again under DDP.
    """

    def __init__(
        self, profile: BackwardProfile, *, forward_s: float = 0.0, value: float = 1.0
    ) -> None:
        """Makes the parameters (zeros, float32).

        Args:
            profile: sizes, which are multiples of 4 bytes, and ready times.
            forward_s: time that a forward pass sleeps, in seconds.
            value: value of every element of a gradient before DDP averages it over ranks.

        Raises UserError for a gradient that is not float32 or not a whole number of its elements,
        and for names and an order of registration that no module can have.
        """
        super().__init__()
        _check_gradients(profile)
        self.profile = profile
        self.forward_s = forward_s
        self.value = value
        parameters = _register(self, profile)
        # Not registered as buffers: DDP would broadcast them in every forward pass.
        self._in_ready_order = [parameters[name] for name in profile.names]
        self._gradients = [torch.full_like(parameter, value) for parameter in self._in_ready_order]
        self._handed_s = [0.0] * (len(profile.names) + 1)
        self._first_node_s = 0.0
        self._used = False
        self._overhead = _Overhead()
        self._sleeps_s = [CALIBRATION_SLEEP_S] * len(self._handed_s)
        self._overhead = self._calibrate()
        self._sleeps_s = self._overhead.sleeps_s(profile)

    def forward(self) -> Tensor:
        """Returns a loss of 0 whose backward pass replays the recorded one."""
        until = time.perf_counter() + self.forward_s
        self._renew()
        loss = torch.zeros((), requires_grad=True)
        # The backward pass visits these nodes in reverse: the one applied last comes first.
        for index in range(len(self._in_ready_order), -1, -1):
            loss = _Moment.apply(loss, self._parameter(index), self, index)
        _sleep_until(until)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and writes this rank's values over the averages DDP left."""
        super().zero_grad(set_to_none)
        self._renew()

    @property
    def handed_s(self) -> list[float]:
        """Returns the time each gradient was handed over, in the latest backward pass (s)."""
        return self._handed_s[:-1]

    @property
    def ended_s(self) -> float:
        """Returns the duration of the latest backward pass, without DDP's work after it (s)."""
        return self._handed_s[-1] + self._overhead.tail_s

    @property
    def lateness_s(self) -> float:
        """Returns the largest delay of a gradient or the end of the latest backward pass (s).

        A tenth of a millisecond is a sleep's usual error. Much more means that the copies between
        two gradients, or other work on the core, took longer than the sleep that was to hide them.
        """
        late = (h - ready for h, ready in zip(self.handed_s, self.profile.ready_s, strict=True))
        return max(self.ended_s - self.profile.backward_s, *late)

    def _parameter(self, index: int) -> nn.Parameter | None:
        """Returns the parameter at a place of the ready order; None at the end of the pass."""
        return self._in_ready_order[index] if index < len(self._in_ready_order) else None

    def _renew(self) -> None:
        if not self._used:
            return
        for parameter, gradient in zip(self._in_ready_order, self._gradients, strict=True):
            if parameter.grad is None:  # else it may be an accumulated gradient's memory
                gradient.fill_(self.value)
        self._used = False

    def _calibrate(self) -> _Overhead:
        """Measures the overhead, over a few passes that sleep once, before their first gradient."""
        samples = []
        for _ in range(CALIBRATION_PASSES):
            loss = self()
            called_s = time.perf_counter()
            loss.backward()
            took_s = time.perf_counter() - self._first_node_s
            lead_s = self._first_node_s - called_s
            wake_s = self._handed_s[0] - CALIBRATION_SLEEP_S
            samples.append((lead_s, wake_s, took_s - self._handed_s[-1]))
            self.zero_grad()
        # Lower quartiles: delays by other work on the core must not enter what every pass sleeps.
        lead_s, wake_s, tail_s = (
            statistics.quantiles(column, n=4)[0] for column in zip(*samples, strict=True)
        )
        return _Overhead(lead_s=lead_s, wake_s=wake_s, tail_s=tail_s)

    def _arrive(self, index: int) -> None:
        """Waits for a moment of the backward pass and records the time."""
        if index == 0:
            self._first_node_s = time.perf_counter()
            self._used = True
        _sleep_until(self._first_node_s + self._sleeps_s[index])
        elapsed_s = time.perf_counter() - self._first_node_s
        self._handed_s[index] = self._overhead.lead_s + elapsed_s

    def _gradient(self, index: int) -> Tensor | None:
        """Returns the gradient at a place of the ready order, None at the end of the pass."""
        parameter = self._parameter(index)
        if parameter is None:
            return None
        # Autograd takes a tensor that nobody else holds as it is, and clones any other
        # (torch/csrc/autograd/functions/accumulate_grad.h): a new tensor shares the prepared
        # memory, unless the parameter's gradient may be in it already.
        if parameter.grad is None:
            return self._gradients[index].detach()
        return torch.full_like(parameter, self.value)


@dataclass(frozen=True)
class _Overhead:
    """The cost of a backward pass besides its sleeps, in seconds.

    ``lead_s`` is spent before its first node (autograd counts the graph's nodes: 0.4 ms for the 436
    of gpt2-large), ``wake_s`` at the end of a sleep, ``tail_s`` after its last node.
    """

    lead_s: float = 0.0
    wake_s: float = 0.0
    tail_s: float = 0.0

    def sleeps_s(self, profile: BackwardProfile) -> list[float]:
        """Returns when the sleep for each gradient, then for the end, is over (s).

        Times count from the first node of the backward pass.
        """
        end_s = profile.backward_s - self.tail_s
        moments = [*(min(ready_s, end_s) for ready_s in profile.ready_s.tolist()), end_s]
        return [moment_s - self.lead_s - self.wake_s for moment_s in moments]


class _Moment(torch.autograd.Function):
    """A node that passes its input on and, backward, hands over one parameter's gradient in time.

    Each gradient has a node of its own: autograd runs AccumulateGrad, and with it DDP's hook,
    before any other node that is ready, so gradients come one by one in the recorded order.
    """

    @staticmethod
    def forward(ctx, upstream: Tensor, parameter: Tensor | None, model: ReplayModel, index: int):
        ctx.model, ctx.index = model, index
        return upstream.view_as(upstream)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.model._arrive(ctx.index)
        return gradient, ctx.model._gradient(ctx.index), None, None


def _sleep_until(moment_s: float) -> None:
    """Sleeps, without the interpreter's lock, until ``perf_counter`` reaches ``moment_s``."""
    while (left_s := moment_s - time.perf_counter()) > 0:
        time.sleep(left_s)


def _check_gradients(profile: BackwardProfile) -> None:
    kinds = sorted(set(profile.kinds) - {"float32"})
    if kinds:
        raise UserError(f"a replay of {', '.join(kinds)} gradients: only float32 is known")
    for name, size in zip(profile.names, profile.sizes_bytes.tolist(), strict=True):
        if size % BYTES_PER_ELEMENT:
            raise UserError(
                f"gradient {name} of {size} bytes: float32 takes a multiple of {BYTES_PER_ELEMENT}"
            )


def _register(model: nn.Module, profile: BackwardProfile) -> dict[str, nn.Parameter]:
    """Adds the parameters, nested as their names say and registered as recorded; returns them.

    Raises UserError where no module can have these names, or register them in this order.
    """
    count = len(profile.names)
    places = profile.registration or range(count - 1, -1, -1)
    registered = sorted(range(count), key=lambda index: places[index])
    names = [profile.names[index] for index in registered]
    try:
        for index in registered:
            owner = model
            *modules, last = profile.names[index].split(".")
            for module in modules:
                if module not in owner._modules:
                    owner.add_module(module, nn.Module())
                owner = owner._modules[module]
            size = int(profile.sizes_bytes[index]) // BYTES_PER_ELEMENT
            owner.register_parameter(last, nn.Parameter(torch.zeros(size)))
    except KeyError as error:
        raise UserError(
            f"parameter {profile.names[index]!r} cannot be replayed: {error.args[0]}"
        ) from None
    parameters = dict(model.named_parameters())
    if list(parameters) != names:
        position = next(
            i for i, (a, b) in enumerate(zip(parameters, names, strict=False)) if a != b
        )
        raise UserError(
            f"parameter {names[position]!r} is registered at place {position} in the recording, "
            f"where a module of these names has {list(parameters)[position]!r}"
        )
    return parameters
