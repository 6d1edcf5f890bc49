"""Architectures by the name of a published size, or by a configuration.

A size is written as its ``config.json`` has it. MPT is what llm-foundry builds, and GPT-2 is
``common.models.gpt2``, whose weights are [out, in] where transformers' are [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.errors import UserError, unknown_name
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.hugging_face import Model, model_of, read_model, read_values

COLUMNS = {
    "llama": "num_hidden_layers hidden_size num_attention_heads num_key_value_heads"
    " intermediate_size vocab_size",
    "gpt2": "n_layer n_embd n_head vocab_size n_positions",
    "gpt_neox": "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size",
    "bert": "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size"
    " max_position_embeddings",
    "vit": "num_hidden_layers hidden_size num_attention_heads intermediate_size",
    "t5": "num_layers d_model num_heads d_kv d_ff",
    "mpt": "n_layers d_model n_heads",
}
"""Keys of the sizes in a row of ``SIZES``, by family; those of ``llama`` for families that are not
named."""

FIXED: dict[str, Mapping[str, object]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gpt_oss": {"head_dim": 64, "num_experts_per_tok": 4},
    "deepseek_v3": {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
    },
    "t5": {"vocab_size": 32128},
    "vit": {"image_size": 224, "patch_size": 16, "id2label": dict.fromkeys(range(1000))},
    "mpt": {
        "vocab_size": 50368,
        "no_bias": False,
        "learned_pos_emb": True,
        "attn_config": {"alibi": False},
    },
}
"""Values that all published sizes of a family share."""


@dataclass(frozen=True)
class Size:
    """A published size.

    Attributes:
        family: ``model_type`` of the model's config.
        sizes: whole numbers in the order of the family's ``COLUMNS``.
        special: values that the family does not share.
    """

    family: str
    sizes: str
    source: str
    special: Mapping[str, object] = field(default_factory=dict)

    def values(self, seq_len: int | None = None) -> dict[str, object]:
        """Returns the configuration; MPT's benchmarks learn as many positions as are trained."""
        keys = COLUMNS.get(self.family, COLUMNS["llama"]).split()
        values = dict(zip(keys, map(int, self.sizes.split()), strict=True))
        length = {"max_seq_len": seq_len or 2048} if self.family == "mpt" else {}
        fixed = FIXED.get(self.family, {})
        return {"model_type": self.family, **values, **fixed, **self.special, **length}


HUB = "config.json of huggingface.co/"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml"
OWN = "this project"
BERT = HUB + "google-bert/bert-"
SPAN = {"architectures": ["BertForQuestionAnswering"]}
PRETRAINING = {"architectures": ["BertForPreTraining"]}
TIED = {"tie_word_embeddings": True}
FMS = "foundation-model-stack/fms-fsdp, fms_fsdp/utils/config_utils.py"
SIZES = {
    # Small enough to learn the synthetic text to its entropy within a minute.
    "gpt2-pico": Size("gpt2", "2 128 4 256 256", OWN),
    # A laptop's GPT-2: every kind of layer of the large ones, 27.7 MB of float32 gradients.
    "gpt2-nano": Size("gpt2", "6 256 4 8192 256", OWN),
    "gpt2": Size("gpt2", "12 768 12 50257 1024", HUB + "openai-community/gpt2"),
    "gpt2-medium": Size("gpt2", "24 1024 16 50257 1024", HUB + "openai-community/gpt2-medium"),
    "gpt2-large": Size("gpt2", "36 1280 20 50257 1024", HUB + "openai-community/gpt2-large"),
    "gpt2-xl": Size("gpt2", "48 1600 25 50257 1024", HUB + "openai-community/gpt2-xl"),
    "llama-2-7b": Size("llama", "32 4096 32 32 11008 32000", HUB + "meta-llama/Llama-2-7b-hf"),
    "llama-2-13b": Size("llama", "40 5120 40 40 13824 32000", HUB + "meta-llama/Llama-2-13b-hf"),
    "llama-2-34b": Size("llama", "48 8192 64 8 22016 32000", FMS),
    "llama-2-70b": Size("llama", "80 8192 64 8 28672 32000", HUB + "meta-llama/Llama-2-70b-hf"),
    "llama-3-8b": Size("llama", "32 4096 32 8 14336 128256", HUB + "meta-llama/Meta-Llama-3-8B"),
    "llama-3-70b": Size("llama", "80 8192 64 8 28672 128256", HUB + "meta-llama/Meta-Llama-3-70B"),
    "llama-3.1-405b": Size(
        "llama", "126 16384 128 8 53248 128256", HUB + "meta-llama/Llama-3.1-405B"
    ),
    "llama-3.2-1b": Size(
        "llama", "16 2048 32 8 8192 128256", HUB + "meta-llama/Llama-3.2-1B", TIED
    ),
    "llama-3.2-3b": Size(
        "llama", "28 3072 24 8 8192 128256", HUB + "meta-llama/Llama-3.2-3B", TIED
    ),
    "mistral-7b": Size("mistral", "32 4096 32 8 14336 32000", HUB + "mistralai/Mistral-7B-v0.1"),
    "mixtral-8x7b": Size(
        "mixtral", "32 4096 32 8 14336 32000", HUB + "mistralai/Mixtral-8x7B-v0.1"
    ),
    "qwen2.5-7b": Size("qwen2", "28 3584 28 4 18944 152064", HUB + "Qwen/Qwen2.5-7B"),
    "qwen2.5-32b": Size("qwen2", "64 5120 40 8 27648 152064", HUB + "Qwen/Qwen2.5-32B"),
    "qwen3-30b-a3b": Size("qwen3_moe", "48 2048 32 4 6144 151936", HUB + "Qwen/Qwen3-30B-A3B"),
    "gpt-oss-20b": Size(
        "gpt_oss", "24 2880 64 8 2880 201088", HUB + "openai/gpt-oss-20b", {"num_local_experts": 32}
    ),
    "gpt-oss-120b": Size(
        "gpt_oss",
        "36 2880 64 8 2880 201088",
        HUB + "openai/gpt-oss-120b",
        {"num_local_experts": 128},
    ),
    "deepseek-v3": Size(
        "deepseek_v3",
        "61 7168 128 128 18432 129280",
        HUB + "deepseek-ai/DeepSeek-V3",
        {"n_routed_experts": 256, "first_k_dense_replace": 3},
    ),
    "kimi-k2": Size(
        "deepseek_v3",
        "61 7168 64 64 18432 163840",
        HUB + "moonshotai/Kimi-K2-Base",
        {"n_routed_experts": 384, "first_k_dense_replace": 1},
    ),
    "gpt-neox-20b": Size("gpt_neox", "44 6144 64 24576 50432", HUB + "EleutherAI/gpt-neox-20b"),
    "bert-base": Size("bert", "12 768 12 3072 30522 512", BERT + "base-uncased"),
    "bert-base-squad": Size("bert", "12 768 12 3072 30522 512", BERT + "base-uncased", SPAN),
    "bert-large-squad": Size("bert", "24 1024 16 4096 30522 512", BERT + "large-uncased", SPAN),
    "bert-large-pretraining": Size(
        "bert", "24 1024 16 4096 30522 512", BERT + "large-uncased", PRETRAINING
    ),
    "bert-large": Size("bert", "24 1024 16 4096 30522 512", BERT + "large-uncased"),
    "vit-base": Size("vit", "12 768 12 3072", HUB + "google/vit-base-patch16-224"),
    "vit-large": Size("vit", "24 1024 16 4096", HUB + "google/vit-large-patch16-224"),
    "t5-small": Size("t5", "6 512 8 64 2048", HUB + "google-t5/t5-small"),
    "t5-base": Size("t5", "12 768 12 64 3072", HUB + "google-t5/t5-base"),
    "t5-large": Size("t5", "24 1024 16 64 4096", HUB + "google-t5/t5-large"),
    "mpt-125m": Size("mpt", "12 768 12", FOUNDRY),
    "mpt-350m": Size("mpt", "24 1024 16", FOUNDRY),
    "mpt-760m": Size("mpt", "24 1536 12", FOUNDRY),
    "mpt-1b": Size("mpt", "24 2048 16", FOUNDRY),
    "mpt-3b": Size("mpt", "32 2560 20", FOUNDRY),
    "mpt-7b": Size("mpt", "32 4096 32", FOUNDRY),
    "mpt-13b": Size("mpt", "40 5120 40", FOUNDRY),
    "mpt-30b": Size("mpt", "48 7168 56", FOUNDRY),
    "mpt-70b": Size("mpt", "80 8192 64", FOUNDRY),
}
"""Published sizes by name, and two small ones of this project."""
SAME_SIZES = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b"}
NAMES = (*SIZES, *SAME_SIZES)


SEQ_LEN = 1024
"""Tokens of a text where none are asked for."""
FOLLOWED = {
    "resnet-50": "common.models.published.resnet:resnet_50",
    "ssd-300": "common.models.published.ssd:ssd_300",
    "gnmt": "common.models.published.gnmt:gnmt",
    "transformer-big": "common.models.published.transformer_big:transformer_big",
    "transformer-xl-base": "common.models.published.transformer_xl:transformer_xl_base",
    "transformer-xl-large": "common.models.published.transformer_xl:transformer_xl_large",
}
"""Name of a model that is no transformer of one of the families → its ``MODULE:FUNCTION``, which is
followed on fake tensors."""


def gpt2(values: Mapping[str, object], name: str) -> Model:
    """Returns the sizes of ``common.models.gpt2`` from a configuration's values but its type."""
    model = model_of({"model_type": "gpt2", "resid_pdrop": 0.0, "attn_pdrop": 0.0, **values}, name)
    return replace(model, transposed=False)


def sized_architecture(name_or_path: str, seq_len: int | None) -> tuple[Architecture, int | None]:
    """Returns an architecture as ``architecture_of``, and the tokens of its samples.

    By default texts have ``SEQ_LEN`` tokens, or the most that the model takes; images have None.
    """
    tokens = SEQ_LEN if seq_len is None else seq_len
    model = _model(name_or_path, tokens)
    if seq_len is None:
        with suppress(UserError):  # of a text, which has no length of its own
            return model.architecture(None), None
        tokens = min(tokens, getattr(model, "longest", tokens))
    return model.architecture(tokens), tokens


def architecture_of(name_or_path: str, seq_len: int | None) -> Architecture:
    """Returns the architecture of a published size, or of a configuration.

    Args:
        name_or_path: one of ``NAMES``, also as ``Llama 3.1 8B``; a ``config.json``, or its folder.
        seq_len: tokens of a sample; None for images.

    Raises UserError for an unknown name, with the nearest known one; for a sequence that the model
    cannot take; and for a configuration that is wrong (``read_model``).
    """
    return _model(name_or_path, seq_len).architecture(seq_len)


def _model(name_or_path: str, seq_len: int | None) -> Model:
    name = _listed_name(name_or_path)
    if name in SIZES:
        make = gpt2 if SIZES[name].family == "gpt2" else model_of
        return make(SIZES[name].values(seq_len), name_or_path)
    _check_path(name_or_path)
    return read_model(name_or_path)


def configuration_of(name_or_path: str, seq_len: int | None) -> dict[str, object]:
    """Returns the values of a configuration; name and errors as for ``architecture_of``."""
    name = _listed_name(name_or_path)
    if name in SIZES:
        return dict(SIZES[name].values(seq_len))
    _check_path(name_or_path)
    return read_values(name_or_path)


def _listed_name(name: str) -> str:
    name = name.lower().replace(" ", "-")
    return SAME_SIZES.get(name, name)


def _check_path(text: str) -> None:
    """Raises UserError where a text, which is no name of a size, is no path either."""
    if not (Path(text).exists() or "/" in text or text.endswith(".json")):
        refusal = unknown_name("model", text, [*NAMES, *FOLLOWED])
        raise UserError(f"{refusal}; or the path of a config.json")
