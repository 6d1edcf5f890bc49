"""The arms of the options benchmark: the plain step, each option alone, all, all but one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from common.errors import UserError, unknown_name
from common.perfmodel.one_device.workload import Workload
from common.training.precision import check_precision
from common.training.step import check_compiler

BASELINE, AGAIN, ALL = "baseline", "baseline-again", "all"
OPTIONS: dict[str, dict] = {
    "sdpa": {"attention": "sdpa"},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "tf32": {"tf32": True},
    "compile": {"compile": True},
    "fused": {"optimizer_implementation": "fused"},
    "vocab_multiple": {"vocab_multiple": 64},
    "async_batches": {"async_batches": True},
    "foreach": {"optimizer_implementation": "foreach"},
    "loss_chunks": {"loss_chunks": 8},
    "gradient_accumulation": {"gradient_accumulation": 4},
    "activation_checkpointing": {"activation_checkpointing": True},
}
"""Changes that each option makes to the plain settings."""
FAST = tuple(OPTIONS)[:8]
"""Options that ``all`` turns on. Of the rest, foreach excludes fused, two buy memory with time,
and a step that accumulates gradients is another one."""
TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Arm:
    """A training step to compare; one with a ``reason`` is not measured, and that is why."""

    name: str
    workload: Workload
    reason: str = ""


def plan_arms(base: Workload, device: torch.device, names: Iterable[str] = ()) -> list[Arm]:
    """Returns the baseline twice (what differs there is noise) and the named arms, or all arms.

    Raises UserError for a name that no arm has here.
    """
    half = "float16" if unavailable("bfloat16", base, device) else "bfloat16"
    options = [name for name in OPTIONS if name not in {"bfloat16", "float16"} - {half}]
    missing = {name: unavailable(name, base, device) for name in options}
    fast = [name for name in options if name in FAST and not missing[name]]
    everything = _turned_on(base, fast)
    arms = [Arm(BASELINE, base), Arm(AGAIN, base)]
    for name in options:
        workload = base if missing[name] else _turned_on(base, [name])
        arms.append(Arm(name, workload, missing[name] or no_effect(name, base, workload, device)))
    working = {arm.name for arm in arms if not arm.reason}
    arms.append(Arm(ALL, everything, no_effect(ALL, base, everything, device)))
    for name in (name for name in fast if name in working):
        all_but_one = _turned_on(base, [other for other in fast if other != name])
        reason = no_effect(name, all_but_one, everything, device)
        arms.append(Arm(f"{ALL}-but-{name}", all_but_one, reason))
    chosen = {BASELINE, AGAIN, *(names or (arm.name for arm in arms))}
    arm_names = [arm.name for arm in arms]
    for name in chosen.difference(arm_names):
        raise UserError(unknown_name("arm", name, arm_names))
    return [arm for arm in arms if arm.name in chosen]


def unavailable(name: str, base: Workload, device: torch.device) -> str:
    """Returns the reason why an option cannot be turned on here; empty where it can."""
    try:
        workload = _turned_on(base, [name])
        check_precision(workload.precision, device)
        if workload.compile:
            check_compiler(device)
    except UserError as error:
        return f"not available: {error}"
    return ""


def no_effect(name: str, without: Workload, with_: Workload, device: torch.device) -> str:
    """Returns the reason why an option changes no computation here; empty where it does."""
    if effective(with_, device) != effective(without, device):
        return ""
    reasons = [reason for reason in with_.without_effect(device.type) if reason.startswith(name)]
    if reasons:
        return f"no effect: {reasons[0]}"
    if name == "tf32" and not without.tf32:
        return "no effect: TF32 needs an Ampere GPU or a later one"
    if name == "vocab_multiple":
        return f"no effect: {with_.config.vocab_size:,} tokens are a multiple of 64 already"
    return "no effect: it is on in the baseline"


def effective(workload: Workload, device: torch.device) -> Workload:
    """Returns the same workload with all options off that change nothing on ``device``."""
    on_gpu = device.type == "cuda"
    tf32 = workload.tf32 and on_gpu and workload.precision == "float32"
    implementation = workload.optimizer_implementation
    return replace(
        workload,
        tf32=tf32 and torch.cuda.get_device_capability(device) >= TF32_CAPABILITY,
        async_batches=workload.async_batches and on_gpu,
        vocab_multiple=workload.config.vocab_size,
        optimizer_implementation=(
            "for-loop" if implementation == "foreach" and not on_gpu else implementation
        ),
    )


def _turned_on(base: Workload, names: Iterable[str]) -> Workload:
    changes: dict = {}
    for name in names:
        changes |= OPTIONS[name]
    return replace(base, **changes)
