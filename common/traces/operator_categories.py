"""The kinds of work of operators and kernels, by their names.

The names are those of the operators that reach a device's kernels (``aten::addmm``), not of what a
program calls (``aten::linear``). Whatever such an operator calls inside belongs to it: the copy
that ``aten::addmm`` makes of its bias is part of a matrix product. Operators that only pass on to
others have no category of their own.
"""

from __future__ import annotations

import re

MATRIX = "matrix products"
ATTENTION = "attention"
NORMALISATION = "normalisation"
ELEMENTWISE = "activation & element-wise"
FUSED = "fused element-wise"
LOSS = "loss"
EMBEDDING = "embedding"
OPTIMIZER = "optimizer"
DATA = "data"
COPIES = "copies & fills"
BOOKKEEPING = "views, allocation, autograd"
OTHER = "other"
IDLE = "idle"

CATEGORIES = (
    MATRIX,
    ATTENTION,
    NORMALISATION,
    ELEMENTWISE,
    FUSED,
    LOSS,
    EMBEDDING,
    OPTIMIZER,
    DATA,
    COPIES,
    BOOKKEEPING,
    OTHER,
    IDLE,
)
"""All of them, in the order in which figures and tables show them."""

# In a GPT-2 only attention multiplies batches of matrices, masks, and takes a softmax that is not
# the loss's logarithm of one.
OPERATORS = {
    MATRIX: "mm addmm addmm_ mv addmv dot _scaled_mm",
    ATTENTION: "bmm baddbmm _softmax _softmax_backward_data _safe_softmax masked_fill masked_fill_ "
    "triu tril",
    NORMALISATION: "native_layer_norm native_layer_norm_backward _fused_rms_norm "
    "_fused_rms_norm_backward",
    ELEMENTWISE: "add add_ sub sub_ mul mul_ div div_ neg abs pow sqrt rsqrt exp exp_ log tanh "
    "sigmoid relu gelu gelu_backward tanh_backward silu silu_backward native_dropout "
    "native_dropout_backward bernoulli_ where eq ne gt ge lt le bitwise_and logical_and clamp "
    "clamp_ clamp_min clamp_min_ sum mean amax max min lerp_ addcmul_ addcdiv_",
    LOSS: "_log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward logsumexp "
    "gather scatter_add_",
    EMBEDDING: "embedding embedding_dense_backward index_select",
    COPIES: "copy_ _to_copy clone cat stack fill_ zero_ zeros zeros_like ones ones_like full "
    "full_like new_zeros new_ones new_full arange scalar_tensor _local_scalar_dense pin_memory",
    BOOKKEEPING: "view _unsafe_view _reshape_alias t transpose permute unbind select slice expand "
    "as_strided squeeze unsqueeze split split_with_sizes detach detach_ alias empty empty_like "
    "empty_strided new_empty new_empty_strided resize_ set_ lift_fresh resolve_conj resolve_neg",
}
OF_OPERATOR = {
    f"aten::{name}": category for category, names in OPERATORS.items() for name in names.split()
}
PREFIXES = {
    ATTENTION: "_scaled_dot_product _flash_attention _efficient_attention _cudnn_attention",
    OPTIMIZER: "_fused_adam _fused_sgd _foreach_ _amp_",
}
OF_PREFIX = {
    tuple(f"aten::{name}" for name in names.split()): category
    for category, names in PREFIXES.items()
}

# Passed through on the way to an operator. What they take themselves is PyTorch's bookkeeping.
PASSING_ON_NAMES = (
    "linear matmul to reshape contiguous flatten unflatten dropout layer_norm softmax log_softmax "
    "scaled_dot_product_attention cross_entropy_loss nll_loss nll_loss_nd item embedding_backward "
    "chunk narrow expand_as view_as type_as numpy_T"
)
PASSING_ON = {f"aten::{name}" for name in PASSING_ON_NAMES.split()}
GENERATED = re.compile(r"^(triton_|graph_\d+_|cpp_fused|kernel_cpp)|_cpp_fused_")
"""Kernels that torch.compile wrote; their names list the operators in them."""

# Kernels whose launching operator a trace does not show, in order of trial.
KERNELS = (
    (re.compile(r"memcpy|memset|copy_kernel|FillFunctor", re.I), COPIES),
    (re.compile(r"flash|fmha|softmax_warp", re.I), ATTENTION),
    (re.compile(r"gemm|cutlass|xmma|cublas|nvjet|splitK", re.I), MATRIX),
    (re.compile(r"layer_?norm", re.I), NORMALISATION),
    (re.compile(r"nll_loss|cunn_SoftMax", re.I), LOSS),
    (re.compile(r"embedding|indexSelect", re.I), EMBEDDING),
    (re.compile(r"multi_tensor_apply", re.I), OPTIMIZER),
    (re.compile(r"elementwise|reduce_kernel", re.I), ELEMENTWISE),
)


def operator_category(name: str) -> str | None:
    """Returns the category of an operator of a trace, None where it only passes on to others."""
    if name in OF_OPERATOR:
        return OF_OPERATOR[name]
    for prefixes, category in OF_PREFIX.items():
        if name.startswith(prefixes):
            return category
    return generated_category(name) if GENERATED.search(name) else None


def own_time_category(name: str) -> str:
    """Returns the category of the time that an operator without one does not spend in others.

    Names that are in no operators' library are autograd's, torch.compile's or a Function's.
    """
    is_operator = "::" in name and not name.startswith(("autograd::", "torch::autograd"))
    return OTHER if is_operator and name not in PASSING_ON else BOOKKEEPING


def generated_category(name: str) -> str:
    """Returns the category of a kernel that torch.compile wrote, by the operators in its name."""
    for words, category in (
        (r"triton_tem|_mm_|_addmm_|_bmm_", MATRIX),
        (r"log_softmax|nll_loss|logsumexp", LOSS),
        (r"layer_norm", NORMALISATION),
        (r"embedding", EMBEDDING),
    ):
        if re.search(words, name):
            return category
    return FUSED


def kernel_category(name: str) -> str:
    """Returns the category of a device's kernel by its own name."""
    if GENERATED.search(name):
        return generated_category(name)
    return next((category for pattern, category in KERNELS if pattern.search(name)), OTHER)
