"""Hooks that tell the loop's calls to the watch, and that can be taken away again.

Steps come from the optimizers' global hooks, passes from hooks on the outermost module and from
``torch.autograd.backward``, batches from DataLoaders. No hook returns anything, so that none
changes what it sees.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from ddplab_watch import torch_internals

_MISSING = object()


class Hooks:
    """Keeps what has been hooked, so that all of it can be taken off."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def keep(self, handle: Any) -> None:
        """Keeps a handle, whose ``remove`` is called at the end."""
        self._undo.callback(handle.remove)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Callable]) -> None:
        """Replaces an attribute by what ``make`` makes of it."""
        stored = vars(owner).get(name, _MISSING)
        plain = getattr(owner, name)
        new = functools.wraps(plain)(make(plain))
        setattr(owner, name, new)

        def put_back() -> None:
            if vars(owner).get(name) is not new:
                return  # somebody has replaced it since
            if stored is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, stored)

        self._undo.callback(put_back)

    def remove(self) -> None:
        """Takes everything off. What somebody has replaced since stays as it is."""
        self._undo.close()


def watch_updates(hooks: Hooks, ended: Callable[[Any, bool], None]) -> None:
    """Calls ``ended(optimizer, skipped)`` after each update of any optimizer."""
    hooks.keep(
        optimizers.register_optimizer_step_post_hook(
            lambda optimizer, args, kwargs: ended(optimizer, False)
        )
    )

    def scaled(plain: Callable) -> Callable:
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            updated = []
            try:
                handle = optimizer.register_step_post_hook(lambda *_: updated.append(True))
            except Exception:  # no optimizer of torch's; the scaler takes whatever has a ``step``
                return plain(self, optimizer, *args, **kwargs)
            try:
                return plain(self, optimizer, *args, **kwargs)
            finally:
                handle.remove()
                if not updated:  # infinite gradients: the scaler left the update out
                    ended(optimizer, True)

        return step

    hooks.replace(torch.amp.GradScaler, "step", scaled)


def watch_backward(hooks: Hooks, began: Callable[[], None], ended: Callable[[], None]) -> None:
    """Calls ``began`` and ``ended`` around each backward pass.

    Not around one inside of another: reentrant checkpointing has one for each block.
    """
    depth = 0

    def watched(plain: Callable) -> Callable:
        def backward(*args: Any, **kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:
                began()
            try:
                plain(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    ended()

        return backward

    hooks.replace(torch.autograd, "backward", watched)


def watch_fetches(
    hooks: Hooks,
    began: Callable[[], Any],
    ended: Callable[[Any, Any, Any, Any], None],
    emptied: Callable[[], None],
) -> None:
    """Calls ``began()`` before each batch of a DataLoader, ``ended(moment, iterator, ids, batch)``.

    Where there is no batch any more, ``emptied()`` is called instead. ``ids`` are the indices of
    the batch's samples; None where the data set has none.
    """
    iterator = torch_internals.loader_iterator()
    if iterator is None:
        return
    queues: WeakKeyDictionary[Any, tuple[Any, list[Any]]] = WeakKeyDictionary()

    def queue_of(loading: Any) -> list[Any]:
        """Returns what was asked for in this pass over the sampler; an iterator may begin anew."""
        sampled = torch_internals.sampler_pass(loading)
        if loading not in queues or queues[loading][0] is not sampled:
            queues[loading] = sampled, []
        return queues[loading][1]

    def indexed(plain: Callable) -> Callable:
        def _next_index(self: Any) -> Any:
            index = plain(self)
            queue_of(self).append(index)
            return index

        return _next_index

    def fetching(plain: Callable) -> Callable:
        def __next__(self: Any) -> Any:
            moment = began()
            try:
                batch = plain(self)
            except StopIteration:
                emptied()
                raise
            # Workers are ahead of the loop; batches come in the order in which they were asked for.
            queue = queue_of(self)
            ids = queue.pop(0) if queue else None
            ended(moment, self, None if torch_internals.is_endless_sampler(self) else ids, batch)
            return batch

        return __next__

    hooks.replace(iterator, "_next_index", indexed)
    hooks.replace(iterator, "__next__", fetching)


def roots_of(parameters: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Finds the outermost modules that hold any of the parameters, among all objects there are."""
    wanted = {id(parameter) for parameter in parameters}
    roots = _roots(_modules(), wanted)
    if wanted - {id(parameter) for root in roots for parameter in root.parameters()}:
        with _nothing_frozen():
            roots = _roots(_modules(), wanted)
    return roots


def _modules() -> list[nn.Module]:
    """Returns the modules among the objects that the collector looks at.

    By the type: asking an object for its class may import what a lazy module stands for.
    """
    return [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]


def _roots(modules: list[nn.Module], wanted: set[int]) -> list[nn.Module]:
    """Returns the outermost modules that hold any of the parameters, given by their ids."""
    inner = {
        id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()
    }
    return [
        module
        for module in modules
        if id(module) not in inner and any(id(p) in wanted for p in module.parameters())
    ]


@contextmanager
def _nothing_frozen() -> Iterator[None]:
    """Shows objects that the script has hidden from the collector, and hides all there are then.

    Nothing is collected meanwhile. Python can hide all objects only: later ones, too, are not
    collected any more. So this is for a script that has hidden its model itself.
    """
    frozen, is_enabled = gc.get_freeze_count(), gc.isenabled()
    if frozen:
        gc.disable()
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
            if is_enabled:
                gc.enable()


def watch_forward(
    hooks: Hooks,
    module: nn.Module,
    began: Callable[[nn.Module, tuple, dict], None],
    ended: Callable[[nn.Module, Any], None],
) -> None:
    """Calls ``began`` and ``ended`` around each call of a module."""

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        began(module, args, kwargs)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        ended(module, output)

    hooks.keep(module.register_forward_pre_hook(before, with_kwargs=True))
    hooks.keep(module.register_forward_hook(after, always_call=True))
