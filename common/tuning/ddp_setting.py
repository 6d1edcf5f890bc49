"""A way to wrap a model in DDP: bucket caps and options, their names, and the lines to paste.

Most settings change the time of a step only. Two change the numbers, too: a compressed gradient is
rounded, and accumulation makes the global batch larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.errors import UserError
from common.perfmodel.buckets import cap_label, parse_cap
from common.settings import AtLeast, OneOf, Settings

COMPRESSIONS = ("none", "fp16", "bf16")


@dataclass(frozen=True)
class DdpSetting(Settings):
    """The arguments and options by which DDP wraps a model and makes a step.

    Attributes:
        cap_mib: ``bucket_cap_mb``; None is DDP's default (a first bucket of 1 MiB, then 25).
        first_mib: the first bucket's own cap, with an explicit ``cap_mib`` only; None is the cap.
        bucket_view: ``gradient_as_bucket_view``: gradients are not copied back.
        compression: none, fp16 or bf16: the format in which gradients are sent.
        accumulation: micro-batches per exchange.
    """

    cap_mib: float | None = None
    first_mib: float | None = None
    bucket_view: bool = False
    compression: Annotated[str, OneOf(COMPRESSIONS)] = "none"
    accumulation: Annotated[int, AtLeast(1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for cap in (self.cap_mib, self.first_mib):
            if cap is not None:
                parse_cap(cap)
        if self.first_mib is not None and self.cap_mib is None:
            raise UserError("a first bucket of its own needs a cap for the others")

    @property
    def caps_mib_list(self) -> tuple[float, ...]:
        """Returns ``bucket_cap_mb_list``: caps of the first bucket and the others; else empty."""
        return () if self.first_mib is None else (self.first_mib, self.cap_mib)

    def ddp_arguments(self) -> dict[str, object]:
        """Returns the arguments of DistributedDataParallel that are not its defaults."""
        arguments: dict[str, object] = {}
        if self.first_mib is not None:
            arguments["bucket_cap_mb_list"] = list(self.caps_mib_list)
        elif self.cap_mib is not None:
            arguments["bucket_cap_mb"] = self.cap_mib
        if self.bucket_view:
            arguments["gradient_as_bucket_view"] = True
        return arguments

    @property
    def label(self) -> str:
        """Returns the setting's name in tables, such as ``4 MiB, bucket view``."""
        parts = ["default" if self.cap_mib is None else f"{cap_label(self.cap_mib)} MiB"]
        if self.first_mib is not None:
            parts.append(f"first {cap_label(self.first_mib)} MiB")
        if self.bucket_view:
            parts.append("bucket view")
        if self.compression != "none":
            parts.append(f"{self.compression} hook")
        if self.accumulation > 1:
            parts.append(f"{self.accumulation} micro-batches")
        return ", ".join(parts)

    def python(self, on_gpu: bool = False) -> str:
        """Returns the lines of Python that make it: two, and more where the numbers change."""
        arguments = ["model", *(["device_ids=[local_rank]"] if on_gpu else [])]
        arguments += [f"{name}={value!r}" for name, value in self.ddp_arguments().items()]
        lines = [
            "from torch.nn.parallel import DistributedDataParallel",
            f"model = DistributedDataParallel({', '.join(arguments)})",
        ]
        if self.compression != "none":
            hook = f"{self.compression}_compress_hook"
            lines += [
                "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
                f"model.register_comm_hook(None, default_hooks.{hook})",
            ]
        if self.accumulation > 1:
            lines.append(
                f"# with model.no_sync(): in all but the last of {self.accumulation} micro-batches"
            )
        return "\n".join(lines)


DEFAULT = DdpSetting()
