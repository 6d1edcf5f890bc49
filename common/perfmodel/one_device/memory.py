"""The memory of a GPT-2's training step, byte by byte, from sizes alone.

``predict_memory`` is ``predict_training_memory`` of ``common.models.gpt2``: blocks keep what the
formulas of task A0.1 say, and attention and loss may be computed in that module's other ways. The
formulas are for eager execution: a compiled model saves less. They follow what autograd's nodes
save (derivatives.yaml of PyTorch) and, for mixed precision, autocast's rules; Korthikanti et al.
2022 (arXiv 2205.05198) count activations the same way, Rajbhandari et al. 2020 (arXiv 1910.02054)
the states. All figures are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from common.exercises.step_memory import FLOAT32, block_saves, loss_saves, norm_saves, state_bytes
from common.perfmodel.architectures.activations import Activations, Numerics, Piece, exact
from common.perfmodel.architectures.published_sizes import gpt2
from common.perfmodel.one_device.moments import MemoryPrediction
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.training_memory import Passes, predict_training_memory
from common.perfmodel.one_device.workload import Workload


def predict_memory(workload: Workload, sharding: Sharding | None = None) -> MemoryPrediction:
    """Predicts the memory of one rank at each moment of a step that is not the first.

    The first step has no optimizer states yet. What the libraries take (CUDA context, workspaces)
    is not in it. Sharded blocks are gathered in the type that they are computed in, as this
    project's trainer does it.
    """
    model = gpt2(asdict(workload.config), workload.model).architecture(workload.seq_len)
    embedding, block, norm, head = model.layers
    block = replace(block, activations=_of_block(workload, block.activations))
    if workload.loss_chunks > 1:
        head = replace(head, activations=_of_loss_in_pieces(workload))
    passes = Passes(
        architecture=replace(model, layers=(embedding, block, norm, head)),
        batch_size=workload.batch_size,
        numerics=_numerics(workload),
        checkpointing="block" if workload.activation_checkpointing else "none",
        accumulation=workload.gradient_accumulation,
        optimizer=workload.optimizer,
        optimizer_implementation=workload.optimizer_implementation,
        loss_in_pieces=workload.loss_chunks > 1,
    )
    return predict_training_memory(passes, sharding)


def estimated_states(workload: Workload) -> dict[str, int]:
    """Estimates as the course does: bytes of parameters, gradients and states, unsharded."""
    return state_bytes(workload.config.num_parameters(), workload.optimizer)


def saved_bytes_by_layer(workload: Workload) -> dict[str, int]:
    """Computes the bytes that each layer saves for the backward pass, copies of weights included.

    ``embeddings`` keep the tokens and positions they looked up, ``head and loss`` the last norm's
    input and output, the log-softmax of every logit and the targets.
    """
    config, tokens = workload.config, workload.batch_size * workload.seq_len
    size = _numerics(workload).compute_bytes
    mixed = 2 if size < FLOAT32 else 0  # bytes of a weight's copy
    block = sum(_saved_by_block(workload).values())
    block += mixed * config.matrix_parameters_per_layer()
    head = norm_saves(tokens, config.n_embd, size)
    weight = mixed * config.vocab_size * config.n_embd
    logits = loss_saves(tokens, config.vocab_size)
    if workload.loss_chunks > 1:  # its gradients are made already
        logits = tokens * config.n_embd * size + 8
        weight = FLOAT32 * config.vocab_size * config.n_embd
        head -= tokens * config.n_embd * size
    layers = {"embeddings": 8 * (tokens + workload.seq_len)}
    layers |= {f"block {index}": block for index in range(config.n_layer)}
    return layers | {"head and loss": head + weight + logits}


def _numerics(workload: Workload) -> Numerics:
    casts = "float32" if workload.precision == "float32" else "autocast"
    return Numerics(casts, fused_attention=workload.attention == "sdpa")


def _saved_by_block(workload: Workload) -> dict[str, int]:
    """Returns the bytes that one block saves for its backward pass, without checkpointing."""
    config, numerics = workload.config, _numerics(workload)
    return block_saves(
        workload.batch_size * workload.seq_len,
        workload.seq_len,
        config.n_embd,
        config.n_head,
        compute_bytes=numerics.compute_bytes,
        fused_attention=numerics.fused_attention,
    )


def _of_block(workload: Workload, activations: Activations) -> Activations:
    """Returns the activations of a block with what task A0.1 says that it keeps.

    In written-out attention's backward pass the values and their mixture are gone, and the values'
    gradient is there.
    """
    feed_forward, attention = activations.backward
    freed = exact("attention", -workload.seq_len * workload.config.n_embd)
    backward = (feed_forward, (*attention, freed))
    if workload.attention == "sdpa":  # holds less there than in the feed-forward half
        backward = (feed_forward,)
    return replace(
        activations, kept=_pieces(_saved_by_block(workload), workload), backward=backward
    )


def _of_loss_in_pieces(workload: Workload) -> Activations:
    """Returns the activations of a head whose loss is computed in pieces.

    One piece's logits are there, and the head's gradients, which are made with them. In the
    backward pass these are there as they were made and as scaled.
    """
    config, size = workload.config, _numerics(workload).compute_bytes
    tokens = workload.batch_size * workload.seq_len
    width, weight = tokens * config.n_embd, config.vocab_size * config.n_embd
    piece = -(-tokens // workload.loss_chunks) * config.vocab_size
    logits, unrounded = FLOAT32 * piece, 0
    if size < FLOAT32:  # rounded logits, and exact ones or the part of the weight's gradient
        logits = size * piece + max(FLOAT32 * piece, size * weight)
        unrounded = FLOAT32 * width  # the last norm's output
    gradients = FLOAT32 * weight + size * width
    forward = {
        "logits and loss": logits + size * width,
        "temporary buffers": gradients + unrounded,
    }
    backward = {"temporary buffers": 2 * gradients}
    return Activations(forward=_pieces(forward, workload), backward=(_pieces(backward, workload),))


def _pieces(sizes: Mapping[str, int], workload: Workload) -> tuple[Piece, ...]:
    """Returns bytes of the whole batch, by part, as pieces of a sample."""
    return tuple(Piece(part, (size / workload.batch_size,) * 3) for part, size in sizes.items())
