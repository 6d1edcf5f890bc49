"""Refuses to join or compare measurements of different settings, devices or networks."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from common.errors import NotYetWritten, UserError
from common.exercises.comparable_runs import Conditions, differing_conditions, differing_setting
from common.runtime.group.network import OVER_LOOPBACK, backend_name, layout_name

logger = logging.getLogger(__name__)

Measured = tuple[str, Mapping]
"""Name of a table or a run for the reader, and the environment record beside it."""


def require_same(
    measured: Iterable[Measured],
    advice: str = "they cannot be compared",
    alone: Collection[str] = (),
) -> None:
    """Raises UserError where these were measured on different devices or over different networks.

    Where a record does not say which, and it cannot be derived, one warning is logged and nothing
    is refused on its account.

    Args:
        measured: Names and environment records.
        advice: End of the error's line.
        alone: Names of runs that exchanged nothing, so that any network will do.
    """
    measured = list(measured)
    if apart := difference(measured, alone):
        raise UserError(f"{apart}: {advice}")
    silent = [
        name
        for name, record in measured
        if device_of(record) is None
        or (_exchanged(name, record, alone) and network_of(record) is None)
    ]
    if silent and len(measured) > 1:
        logger.warning(
            "%s: the record does not say on which device and network; joined with the others",
            ", ".join(silent),
        )


def require_same_settings(
    settings: Iterable[tuple[str, Mapping]],
    titles: Mapping[str, str],
    advice: str = "they cannot be compared",
    *,
    unknown_agrees: bool = False,
) -> None:
    """Raises UserError naming the first setting in which two of these runs differ.

    Args:
        settings: Names of runs for the reader, and their settings.
        titles: Settings that must agree → their names for the reader.
        advice: End of the error's line.
        unknown_agrees: Whether a setting that only one of two runs has is no difference.
    """
    pairs = list(itertools.combinations(settings, 2))
    for key, title in titles.items():
        for (name, mine), (other, theirs) in pairs:
            if _unless_open(differing_setting, mine, theirs, [key], unknown_agrees=unknown_agrees):
                raise UserError(
                    f"{title} differs between {name} ({mine.get(key)}) and {other} "
                    f"({theirs.get(key)}): {advice}"
                )


def difference(measured: Iterable[Measured], alone: Collection[str] = ()) -> str | None:
    """Returns the first difference in device or network as a sentence, or None.

    Arguments are those of ``require_same``. Networks are compared between records of several
    ranks. Of different numbers of ranks, as in a study of scaling, one job may lie on one host and
    another on several.
    """
    runs = [(name, record, _conditions(name, record, alone)) for name, record in measured]
    for what, value_of in {"device": device_of, "network": network_of}.items():
        for (name, record, mine), (other, their_record, theirs) in itertools.combinations(runs, 2):
            if _unless_open(differing_conditions, mine, theirs) == what:
                values = [value_of(side) or "not recorded" for side in (record, their_record)]
                return f"{what} differs between {name} ({values[0]}) and {other} ({values[1]})"
    return None


def _unless_open(
    compare: Callable[..., str | None], *arguments: object, **named: object
) -> str | None:
    """Compares, but in a student's tree in which task A4.1 is open: there nothing is refused."""
    try:
        return compare(*arguments, **named)
    except NotYetWritten as error:
        _say_unchecked(str(error))
        return None


@functools.cache  # once is enough
def _say_unchecked(reason: str) -> None:
    logger.warning("%s: what may be compared is not checked", reason)


def device_of(record: Mapping) -> str | None:
    """Returns the name of the GPU or CPU of a record; older ones say it with their GPUs or CPU."""
    gpus, cpu = record.get("gpus"), record.get("cpu") or {}
    if record.get("device_name"):
        return record["device_name"]
    if gpus:
        return gpus[0].get("name")
    return cpu.get("model") if record.get("device") != "cuda" else None


def short_network(network: str | None) -> str:
    """Returns a network's name in few words: the rate of emulated links; loopback where unknown."""
    return "loopback" if network in (None, OVER_LOOPBACK) else network.rpartition(" at ")[2]


def network_of(record: Mapping) -> str | None:
    """Returns the name of the network of a record; in older ones it follows from the ranks."""
    size, local = record.get("world_size"), record.get("ranks_per_node")
    if record.get("network") or not size or not local:
        return record.get("network")
    if record.get("launcher") == "single":  # it started its ranks on its own host
        local = size
    hosts, on_last = divmod(size, local)
    return layout_name(record.get("backend"), (local,) * hosts + ((on_last,) if on_last else ()))


def _conditions(name: str, record: Mapping, alone: Collection[str]) -> Conditions:
    return Conditions(
        device=device_of(record),
        network=network_of(record),
        is_emulated=bool((record.get("interconnect") or {}).get("emulated")),
        exchanged=_exchanged(name, record, alone),
        world_size=record.get("world_size"),
        backend=backend_name(record.get("backend"), record.get("process_group")),
        ranks_per_gpu=record.get("ranks_per_gpu", 1),
    )


def _exchanged(name: str, record: Mapping, alone: Collection[str]) -> bool:
    return name not in alone and record.get("world_size") != 1
