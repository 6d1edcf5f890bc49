"""The lines of Python that make a plan, to paste into a training script."""

from __future__ import annotations

from common.perfmodel.buckets import cap_label
from common.planning.space import SINGLE, Plan, Question


def python_lines(question: Question, plan: Plan) -> list[str]:
    """Returns the lines of Python that wrap ``model``, make ``optimizer`` and run a step."""
    return wrapping_lines(question, plan) + step_lines(question, plan)


def wrapping_lines(question: Question, plan: Plan) -> list[str]:
    """Returns the lines that wrap ``model`` and make ``optimizer``, which stand before the loop."""
    lines = []
    by_blocks = plan.checkpointing != "none" and not question.checkpointing_switch
    if by_blocks or plan.is_sharded:
        lines.append(f"blocks = {_blocks(question)}")
    lines += _checkpointing(question, plan)
    lines += _wrapping(question, plan)
    trained = "model.parameters()"
    if any(layer.frozen for layer in question.architecture.layers):
        lines.append("trained = [weight for weight in model.parameters() if weight.requires_grad]")
        trained = "trained"
    if plan.strategy == "ZERO1":
        lines += [
            "from torch.distributed.optim import ZeroRedundancyOptimizer",
            f"optimizer = ZeroRedundancyOptimizer({trained}, torch.optim.AdamW, lr=lr, fused=True)",
        ]
    else:
        lines.append(f"optimizer = torch.optim.AdamW({trained}, lr=lr, fused=True)")
    return lines


def _blocks(question: Question) -> str:
    """Returns an expression of the model's blocks: its lists where their names are known."""
    names = [layer.name for layer in question.architecture.blocks]
    lists = dict.fromkeys(
        name.rpartition(".")[0] for name in names if name.rpartition(".")[2].isdigit()
    )
    if not lists:
        return "[...]  # the model's repeated layers, in the order of the forward pass"
    return "[" + ", ".join(f"*{_module(name)}" for name in lists) + "]"


def _module(path: str) -> str:
    """Returns an expression of a module of ``model`` by its path; empty is the model itself."""
    if all(part.isidentifier() for part in path.split(".")):
        return f"model.{path}"
    return f'model.get_submodule("{path}")' if path else "model"


def _checkpointing(question: Question, plan: Plan) -> list[str]:
    if plan.checkpointing == "none":
        return []
    lines, context = [], ""
    if not question.checkpointing_switch:
        lines += ["from functools import partial", "from torch.utils.checkpoint import checkpoint"]
    if plan.checkpointing == "selective":
        lines += [
            "from torch.utils.checkpoint import CheckpointPolicy as Policy",
            "from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts",
            "aten = torch.ops.aten",
            "products = (aten.mm.default, aten.addmm.default, aten.convolution.default)",
            "def every_second_product():",
            "    seen = [0, 0]",
            "    def policy(ctx, op, *args, **kwargs):",
            "        product = op in products",
            "        seen[ctx.is_recompute] += product",
            "        keep = product and seen[ctx.is_recompute] % 2 == 1",
            "        return Policy.MUST_SAVE if keep else Policy.PREFER_RECOMPUTE",
            "    return contexts(policy)",
        ]
        context = ", context_fn=every_second_product"
    if question.checkpointing_switch:  # it leaves out its cache of keys and values then
        settings = f"dict(use_reentrant=False{context})"
        return [*lines, f"model.{question.checkpointing_switch}({settings})"]
    return [
        *lines,
        "for block in blocks:  # of transformers: model.gradient_checkpointing_enable(...)",
        f"    block.forward = partial(checkpoint, block.forward, use_reentrant=False{context})",
    ]


def _wrapping(question: Question, plan: Plan) -> list[str]:
    if plan.strategy == SINGLE:
        return []
    if not plan.is_sharded:
        local = ["device_ids=[local_rank]"] if question.device == "cuda" else []
        cap = plan.bucket_cap_mib
        caps = [] if cap is None else [f"bucket_cap_mb={cap_label(cap)}"]
        arguments = ", ".join(["model", *local, *caps])
        return [
            "from torch.nn.parallel import DistributedDataParallel",
            f"model = DistributedDataParallel({arguments})",
        ]
    reshard = plan.strategy != "SHARD_GRAD_OP"
    imports, settings = ["fully_shard"], []
    lines = []
    if plan.precision == "bfloat16":
        imports.append("MixedPrecisionPolicy")
        lines.append("policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)")
    if plan.strategy == "HYBRID_SHARD":
        shape = (question.ranks // question.ranks_per_node, question.ranks_per_node)
        lines += [
            "from torch.distributed.device_mesh import init_device_mesh",
            f'mesh = init_device_mesh("{question.device}", {shape}, '
            'mesh_dim_names=("replicate", "shard"))',
        ]
        settings.append("mesh=mesh")
    if plan.precision == "bfloat16":
        settings.append("mp_policy=policy")
    of_blocks = [f"reshard_after_forward={reshard}", *settings]
    size = plan.blocks_per_unit
    unit = "for block in blocks:", "block"
    if size > 1:
        unit = f"for i in range(0, len(blocks), {size}):", f"blocks[i : i + {size}]"
    of_root = ", ".join(["reshard_after_forward=False", *settings])
    return [
        f"from torch.distributed.fsdp import {', '.join(imports)}",
        *lines,
        "for parameter in model.parameters():  # all ranks begin with rank 0's, as under DDP",
        "    torch.distributed.broadcast(parameter.data, src=0)",
        unit[0],
        f"    fully_shard({unit[1]}, {', '.join(of_blocks)})",
        f"fully_shard(model, {of_root})",
        *_prefetch(plan),
    ]


def _prefetch(plan: Plan) -> list[str]:
    """Returns the lines that say which units FSDP gathers ahead, as ``gather_ahead`` does it."""
    every = f"blocks[::{plan.blocks_per_unit}]" if plan.blocks_per_unit > 1 else "blocks"
    if plan.prefetch == 1:  # as FSDP does by itself
        return []
    if plan.prefetch == 0:
        return [
            f"for unit in (model, *{every}):  # itself: nothing is gathered ahead",
            "    unit.set_modules_to_backward_prefetch([unit])",
        ]
    last = plan.prefetch + 1
    return [
        f"first, last = [model, *{every}], [model, *{every}[::-1]]",
        "for i in range(len(first)):",
        f"    first[i].set_modules_to_forward_prefetch(first[i + 1 : i + {last}] or [first[i]])",
        f"    last[i].set_modules_to_backward_prefetch(last[i + 1 : i + {last}] or [last[i]])",
    ]


def step_lines(question: Question, plan: Plan) -> list[str]:
    """Returns the lines of one step: of ``micro_batches``, or of ``batch`` where there is one."""
    count, lines = plan.accumulation, []
    waits = count > 1 and plan.has_buckets
    if waits:
        lines.append("from contextlib import nullcontext")
    parts = "micro_batches" if count > 1 else "[batch]"
    lines.append(f"for index, part in enumerate({parts}):  # {count} of {plan.micro_batch} samples")
    if count > 1 and plan.is_sharded and not plan.reduces_each:
        lines.append(f"    model.set_requires_gradient_sync(index == {count - 1})")
        deep = plan.strategy == "SHARD_GRAD_OP"
        lines.append(f"    model.set_reshard_after_backward(index == {count - 1}, recurse={deep})")
    indent = "    "
    if waits:
        lines.append(f"    with model.no_sync() if index < {count - 1} else nullcontext():")
        indent = "        "
    if plan.precision == "bfloat16" and not plan.is_sharded:
        lines.append(f'{indent}with torch.autocast("{question.device}", dtype=torch.bfloat16):')
        lines.append(f"{indent}    loss = loss_of(model, part)")
    else:
        lines.append(f"{indent}loss = loss_of(model, part)")
    share = f" / {count}" if count > 1 else ""
    lines.append(f"{indent}(loss{share}).backward()" if share else f"{indent}loss.backward()")
    return [*lines, "optimizer.step()", "optimizer.zero_grad()"]
