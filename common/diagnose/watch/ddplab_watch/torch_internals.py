"""All names of PyTorch that are not public, in one place; each may be missing in another version.

``missing()`` names those that this version does not have, so that the bundle says what is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
import torch.utils.checkpoint
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.utils.data import dataloader

LOG_LEVEL = "KINETO_LOG_LEVEL"
"""Variable of the environment that PyTorch's profiler reads when it starts."""
COLLECTIVES = ("c10d::", "_c10d_functional::")
"""Beginnings of the operators that exchange something."""


def loader_iterator() -> type | None:
    """Returns the class of a DataLoader's iterators, whose ``__next__`` fetches a batch."""
    kind = getattr(dataloader, "_BaseDataLoaderIter", None)
    return kind if hasattr(kind, "__next__") and hasattr(kind, "_next_index") else None


def is_endless_sampler(iterator: Any) -> bool:
    """Returns True if a DataLoader's iterator is over an iterable data set: it has no indices."""
    kinds = getattr(dataloader, "_DatasetKind", None)
    return kinds is not None and getattr(iterator, "_dataset_kind", None) == kinds.Iterable


def data_set(iterator: Any) -> Any:
    """Returns the data set of a DataLoader's iterator."""
    return getattr(iterator, "_dataset", None)


def loader_of(iterator: Any) -> int:
    """Returns what tells a DataLoader from others: its sampler, which all its iterators share."""
    return id(getattr(iterator, "_index_sampler", iterator))


def sampler_pass(iterator: Any) -> Any:
    """Returns the iterator over the sampler, which is a new one in each epoch."""
    return getattr(iterator, "_sampler_iter", None)


def draws_by_weight(iterator: Any) -> bool:
    """Returns True if a DataLoader's sampler draws by weights, and so a sample more than once."""
    batches = getattr(iterator, "_index_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # inside of one of accelerate's
    sampler = getattr(batches, "sampler", batches)
    return hasattr(sampler, "weights") and bool(getattr(sampler, "replacement", False))


def workers(iterator: Any) -> int:
    """Returns the worker processes of a DataLoader's iterator."""
    return int(getattr(iterator, "_num_workers", 0))


def keeps_workers(iterator: Any) -> bool:
    """Returns True if the workers of a DataLoader's iterator go on from epoch to epoch."""
    return bool(getattr(iterator, "_persistent_workers", False))


def loader_arguments(iterator: Any) -> dict[str, Any]:
    """Returns the arguments of an iterator's DataLoader that say how a batch is made.

    ``is_batched`` is none of them: whether it makes batches, or takes what the data set gives.
    """
    processes = getattr(iterator, "_workers", None)
    return {
        "collate_fn": getattr(iterator, "_collate_fn", None),
        "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
        "worker_init_fn": getattr(iterator, "_worker_init_fn", None),
        "prefetch_factor": getattr(iterator, "_prefetch_factor", None),
        # The kind of process knows how it is started.
        "multiprocessing_context": getattr(processes[0], "_start_method", None)
        if processes
        else None,
        "is_batched": bool(getattr(iterator, "_auto_collation", True)),
    }


def sends_buffers(module: Any) -> bool:
    """Returns True for DDP that will send rank 0's buffers to all ranks in its next call."""
    try:
        return isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers()
    except AttributeError:  # another version of torch
        return False


def reducer(ddp: DistributedDataParallel) -> Any:
    """Returns what exchanges DDP's gradients."""
    return getattr(ddp, "reducer", None)


def can_swap_group(ddp: DistributedDataParallel) -> bool:
    """Returns True if the process group of DDP's reducer can be replaced and put back."""
    return hasattr(reducer(ddp), "_update_process_group")


def swap_group(ddp: DistributedDataParallel, group: torch.distributed.ProcessGroup) -> None:
    """Makes DDP's reducer send through ``group``. DDP's own method would rebuild the buckets."""
    reducer(ddp)._update_process_group(group)


def send_after_pass(ddp: DistributedDataParallel) -> None:
    """Makes DDP send all buckets as the backward pass ends, from within it.

    With a static graph it does so in its first pass.
    """
    torch.autograd.Variable._execution_engine.queue_callback(reducer(ddp)._delay_all_reduce)


def ddp_facts(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Returns how DDP was made: its arguments as it keeps them, and its hook's name."""
    names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    facts: dict[str, Any] = {name: bool(getattr(ddp, name, False)) for name in names}
    facts["broadcast_buffers"] = bool(
        getattr(ddp, "broadcast_buffers", getattr(ddp, "forward_sync_buffers", False))
    )
    is_default = bool(getattr(ddp, "bucket_bytes_cap_default", False))
    cap_bytes = getattr(ddp, "bucket_bytes_cap", None)
    facts["bucket_cap_mb"] = None if is_default or not cap_bytes else cap_bytes / 2**20
    hooks = getattr(ddp, "_comm_hooks", None) or []
    facts["comm_hook"] = " ".join(getattr(hook, "__qualname__", str(hook)) for hook, _ in hooks)
    return facts


def group_class(group: torch.distributed.ProcessGroup, device: torch.device) -> str:
    """Returns the name of the class that sends tensors of ``device``; empty where torch hides it.

    A process group holds one for each kind of device, or, made in Python, may be it itself.
    """
    if type(group) is not torch.distributed.ProcessGroup:
        return type(group).__name__
    try:
        backend = group._get_backend(device)
    except (AttributeError, RuntimeError):
        return ""
    return type(getattr(backend, "wrapped_pg", backend)).__name__  # TORCH_DISTRIBUTED_DEBUG=DETAIL


def send_unchecked(
    group: torch.distributed.ProcessGroup, device: torch.device
) -> Callable[[torch.Tensor], Any] | None:
    """Returns what starts an all-reduce that ranks do not compare with each other's before it.

    None where they do not compare (``TORCH_DISTRIBUTED_DEBUG=DETAIL`` lets them), or torch hides
    the group that does not.
    """
    try:
        inner = group._get_backend(device).wrapped_pg
    except (AttributeError, RuntimeError):
        return None
    return (lambda tensor: inner.allreduce([tensor])) if hasattr(inner, "allreduce") else None


def sleep_on_gpu(cycles: int) -> None:
    """Keeps the current stream of the current GPU busy, where this version of torch can."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(cycles)


def job_store() -> torch.distributed.Store | None:
    """Returns the store by which the job's ranks found each other; None where it is not known."""
    get = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns True for a module that torch.compile runs, wrapped or in place."""
    return type(module).__name__ == "OptimizedModule" or is_compiled_in_place(module)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Returns True if hooks on a module would be compiled with it (``module.compile()``)."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_fsdp(module: torch.nn.Module) -> bool:
    """Returns True for a module under FSDP, of either version."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})


def is_fsdp2(module: torch.nn.Module) -> bool:
    """Returns True for a module under FSDP's second version, whose parameters stay parameters."""
    return "FSDPModule" in {kind.__name__ for kind in type(module).__mro__}


def fsdp_compute_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Returns what a module under FSDP computes in; None where its policy leaves it as it is."""
    state = getattr(module, "_get_fsdp_state", None)
    policy = getattr(state(), "_mp_policy", None) if state else None
    policy = policy or getattr(module, "mixed_precision", None)  # of the first version
    return getattr(policy, "param_dtype", None)


def dtype_before_casts(tensor: torch.Tensor) -> torch.dtype:
    """Returns the type that a model's output had before it was cast, as far as autograd knows it.

    Models and trainers that compute in 16 bits often return float32.
    """
    node, dtype = tensor.grad_fn, tensor.dtype
    while node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
        made = getattr(node, "_input_metadata", ())
        if len(made) != 1:
            break
        dtype = made[0].dtype
    return dtype


def hides_its_passes(root: torch.nn.Module) -> bool:
    """Returns True for a model whose passes hooks cannot see into."""
    return is_compiled_in_place(root) or any(map(is_fsdp, root.modules()))


def is_capturing(device: torch.device | None) -> bool:
    """Returns True while a CUDA graph is captured on the current stream."""
    on_gpu = device is not None and device.type == "cuda"
    return on_gpu and torch.cuda.is_current_stream_capturing()


def collectives_in(run: Callable[[], object]) -> bool:
    """Runs something; returns True if a collective was called in it, in forward or backward.

    The process must not be under a profiler.
    """
    with silent_profiler(), torch.autograd.profiler.profile() as profile:
        run()
    return any(event.name.startswith(COLLECTIVES) for event in profile.function_events)


def is_in_backward() -> bool:
    """Returns True while autograd computes gradients in this thread."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


@contextmanager
def silent_profiler() -> Iterator[None]:
    """Keeps a profiler that starts inside the block from telling the script's user of itself."""
    own_level = os.environ.get(LOG_LEVEL)
    os.environ[LOG_LEVEL] = own_level or "99"
    try:
        yield
    finally:
        if own_level is None:
            del os.environ[LOG_LEVEL]


def matmul_precision() -> str:
    """Returns how float32 is multiplied on a GPU: highest, high or medium; empty if not known.

    A script may set it in either of two ways, and the older one cannot be read after the newer.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        newer = getattr(torch.backends.cuda.matmul, "fp32_precision", "")
        return {"tf32": "high", "ieee": "highest"}.get(newer, "")


def is_profiling() -> bool:
    """Returns True while a profiler of torch is on."""
    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    return bool(enabled and enabled())


def hook_tables(model: torch.nn.Module) -> list[dict]:
    """Returns what holds the hooks of a model's modules, and of the gradients of its parameters.

    Autograd keeps these very tables, so that a hook that is taken out of them is not called.
    """
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    held = [getattr(m, name, None) for m in model.modules() for name in names]
    held += [getattr(parameter, "_backward_hooks", None) for parameter in model.parameters()]
    return [table for table in held if table]


def is_of_script(hook: Any) -> bool:
    """Returns True for a hook that neither PyTorch nor the watch has made."""
    hook = getattr(hook, "func", hook)
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return not str(module).startswith(("torch.", "ddplab_watch."))


@contextmanager
def no_recomputation(calls: list[None]) -> Iterator[None]:
    """Makes ``torch.utils.checkpoint`` keep activations; adds to ``calls`` for each of its calls.

    Its newer kind (``use_reentrant=False``) is meant; ``no_reentrance`` makes the older one of it.
    """
    module, name = torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"
    name += "_impl" * hasattr(module, f"{name}_impl")  # as newer versions call it

    def kept(*_: Any, **__: Any) -> Iterator[None]:
        calls.append(None)
        yield

    with _replaced(module, name, kept):
        yield


@contextmanager
def no_reentrance() -> Iterator[None]:
    """Lets the older kind of ``torch.utils.checkpoint`` (``use_reentrant=True``) do as the newer.

    Both compute the activations a second time, but the older one's gradients cannot be had from
    ``torch.autograd.grad``.
    """
    module = torch.utils.checkpoint

    class NotReentrant:
        """Stands for the function of autograd that has a backward pass inside of its own."""

        @staticmethod
        def apply(function: Callable, preserve: bool, *inputs: Any) -> Any:
            keywords = {"use_reentrant": False, "preserve_rng_state": preserve}
            return module.checkpoint(function, *inputs, **keywords)

    with _replaced(module, "CheckpointFunction", NotReentrant):
        yield


@contextmanager
def _replaced(module: Any, name: str, new: Any) -> Iterator[None]:
    """Gives a module another attribute in place of one that it has; does nothing without it."""
    plain = getattr(module, name, None)
    if plain is not None:
        setattr(module, name, new)
    try:
        yield
    finally:
        if plain is not None:
            setattr(module, name, plain)


def watch_profilers(replace: Callable, begins: Callable[[], None]) -> None:
    """Calls ``begins`` before a profiler of torch starts; ``replace`` is that of the hooks."""
    kind = torch.autograd.profiler.profile

    def preparing(plain: Callable) -> Callable:
        def _prepare_trace(self: Any) -> Any:
            begins()
            return plain(self)

        return _prepare_trace

    if hasattr(kind, "_prepare_trace"):
        replace(kind, "_prepare_trace", preparing)


def missing() -> dict[str, str]:
    """Returns what this version of PyTorch does not let one see, and why."""
    reasons = {}
    if loader_iterator() is None:
        reasons["waiting for data"] = f"torch {torch.__version__} has no _BaseDataLoaderIter"
    return reasons
