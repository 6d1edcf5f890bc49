"""Reads the ``config.json`` of a model of the Hugging Face hub, without its library.

Tensors are those of the class that the transformers library trains: a language model with its
head, a ViT or ResNet that classifies. For BERT and RoBERTa ``architectures`` says which head there
is; where it is missing there is none, but a pooler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from common.errors import UserError, naming, require_known
from common.perfmodel.architectures import decoders
from common.perfmodel.architectures.configuration import Sizes
from common.perfmodel.architectures.convolutional import ResidualNetwork
from common.perfmodel.architectures.encoder_decoder import EncoderDecoder
from common.perfmodel.architectures.parts import Attention, Count, FeedForward
from common.perfmodel.architectures.transformer import Transformer
from common.perfmodel.architectures.vision import VisionTransformer

Model = Transformer | EncoderDecoder | VisionTransformer | ResidualNetwork


def _gpt2(sizes: Sizes) -> Transformer:
    sizes.refuse("add_cross_attention")
    width = sizes.whole("n_embd")
    kinds = {"input_bias": True, "output_bias": True, "fused": True}
    return Transformer(
        name=sizes.name,
        layers=sizes.layers("n_layer"),
        width=width,
        vocabulary=sizes.whole("vocab_size"),
        attention=sizes.attention("n_head", "n_embd", **kinds),
        feed_forward=FeedForward(width=sizes.whole("n_inner", 4 * width), bias=True),
        norm="layer",
        positions="learned",
        position_rows=sizes.whole("n_positions"),
        head=sizes.head(True),
        transposed=True,
        dropout=sizes.share("resid_pdrop", 0.1) > 0,
        attention_dropout=sizes.share("attn_pdrop", 0.1) > 0,
    )


def _gpt_neox(sizes: Sizes) -> Transformer:
    bias = sizes.flag("attention_bias", True)
    return decoders.decoder(
        sizes,
        sizes.attention(input_bias=bias, output_bias=bias, fused=True),
        sizes.feed_forward(bias=True),
        norm="layer",
        registration=("attention_norm", "feed_forward_norm"),
        one_input=sizes.flag("use_parallel_residual", True),
    )


def _opt(sizes: Sizes) -> Transformer:
    sizes.refuse("_remove_final_layer_norm")
    width = sizes.whole("hidden_size")
    embedded = sizes.whole("word_embed_proj_dim", width)
    if embedded != width:
        raise UserError(f"word_embed_proj_dim {embedded}, not hidden_size {width}, is not modelled")
    bias, norm_before = sizes.flag("enable_bias", True), sizes.flag("do_layer_norm_before", True)
    return decoders.decoder(
        sizes,
        sizes.attention(input_bias=bias, output_bias=bias),
        sizes.feed_forward("ffn_dim", bias=bias, relu=True),
        tied=True,
        norm="layer",
        post_norm=not norm_before,
        final_norm=norm_before,
        positions="learned",
        position_rows=sizes.whole("max_position_embeddings") + 2,
        position_offset=2,
        registration=(
            *("attention.key", "attention.value", "attention", "attention_norm"),
            *("feed_forward", "feed_forward_norm"),
        ),
        dropout=sizes.share("dropout", 0.1) > 0,
        attention_dropout=sizes.share("attention_dropout", 0.0) > 0,
    )


def _mpt(sizes: Sizes) -> Transformer:
    """Makes MPT as llm-foundry builds it; transformers has its published form: ALiBi, no bias."""
    attention = sizes.part("attn_config")
    attention.refuse("qk_ln")
    if attention.values.get("attn_type") not in (None, "multihead_attention"):
        raise UserError(f"attn_type {attention.values['attn_type']!r} is not modelled")
    width = sizes.whole("d_model")
    bias, alibi = not sizes.flag("no_bias", True), attention.flag("alibi", True)
    learned = sizes.flag("learned_pos_emb", True) and not alibi
    kinds = {"input_bias": bias, "output_bias": bias, "fused": True}
    return Transformer(
        name=sizes.name,
        layers=sizes.layers("n_layers"),
        width=width,
        vocabulary=sizes.whole("vocab_size"),
        attention=sizes.attention("n_heads", "d_model", **kinds),
        feed_forward=FeedForward(width=sizes.whole("expansion_ratio", 4) * width, bias=bias),
        norm="layer" if bias else "layer_no_bias",
        positions="learned" if learned else "alibi" if alibi else "none",
        position_rows=sizes.whole("max_seq_len") if learned else 0,
        head=sizes.head(True),
    )


def _bert(sizes: Sizes) -> Transformer:
    heads = {
        "BertModel": "none",
        "BertForMaskedLM": "masked",
        "BertForPreTraining": "pretraining",
        "BertForQuestionAnswering": "span",
    }
    return _encoder(sizes, heads)


def _roberta(sizes: Sizes) -> Transformer:
    heads = {
        "RobertaModel": "none",
        "RobertaForMaskedLM": "masked",
        "RobertaForQuestionAnswering": "span",
    }
    return _encoder(
        sizes,
        heads,
        position_offset=1 + sizes.whole("pad_token_id", 1, Count),  # none up to padding's row
        embedding_registration=("token", "segment", "norm"),
    )


def _encoder(sizes: Sizes, heads: Mapping[str, str], **overrides: object) -> Transformer:
    sizes.refuse("add_cross_attention", "is_decoder")
    trained = next(iter(sizes.listed("architectures") or heads))
    require_known("architecture", trained, heads)
    return decoders.decoder(
        sizes,
        sizes.attention(input_bias=True, output_bias=True),
        sizes.feed_forward(bias=True),
        norm="layer",
        post_norm=True,
        final_norm=False,
        positions="learned",
        position_rows=sizes.whole("max_position_embeddings"),
        segments=sizes.whole("type_vocab_size", 2),
        embedding_norm=True,
        pooler=heads[trained] in ("none", "pretraining"),
        head=heads[trained],
        registration=(),
        dropout=sizes.share("hidden_dropout_prob", 0.1) > 0,
        attention_dropout=sizes.share("attention_probs_dropout_prob", 0.1) > 0,
        **overrides,
    )


def _t5(sizes: Sizes) -> EncoderDecoder:
    heads, layers = sizes.whole("num_heads"), sizes.layers("num_layers")
    gated = str(sizes.values.get("feed_forward_proj")).startswith("gated-")
    return EncoderDecoder(
        name=sizes.name,
        encoder_layers=layers,
        decoder_layers=sizes.whole("num_decoder_layers", layers),
        width=sizes.whole("d_model"),
        vocabulary=sizes.whole("vocab_size"),
        attention=Attention(heads=heads, key_value_heads=heads, head_width=sizes.whole("d_kv")),
        feed_forward=sizes.feed_forward("d_ff", gated=gated, relu=not gated),
        position_buckets=sizes.whole("relative_attention_num_buckets", 32),
        ties_head=sizes.flag("tie_word_embeddings", True),
        dropout=sizes.share("dropout_rate", 0.1) > 0,
    )


def _resnet(sizes: Sizes) -> ResidualNetwork:
    activation = sizes.values.get("hidden_act", "relu")
    if activation != "relu":
        raise UserError(f"hidden_act {activation!r} is not modelled")
    return ResidualNetwork(
        name=sizes.name,
        widths=tuple(sizes.listed("hidden_sizes") or (256, 512, 1024, 2048)),
        depths=tuple(sizes.listed("depths") or (3, 4, 6, 3)),
        layer_type=sizes.values.get("layer_type", "bottleneck"),
        embedding_width=sizes.whole("embedding_size", 64),
        shrinks_at_once=sizes.flag("downsample_in_first_stage", False),
        shrinks_first=sizes.flag("downsample_in_bottleneck", False),
        image_width=sizes.whole("image_size", 224),
        channels=sizes.whole("num_channels", 3),
        classes=_classes(sizes),
    )


def _classes(sizes: Sizes) -> int:
    """Returns the number of classes; two where they have no names."""
    return len(sizes.part("id2label").values) or 2


def _vit(sizes: Sizes) -> VisionTransformer:
    return VisionTransformer(
        name=sizes.name,
        layers=sizes.layers("num_hidden_layers"),
        width=sizes.whole("hidden_size"),
        attention=sizes.attention(input_bias=sizes.flag("qkv_bias", True), output_bias=True),
        feed_forward=sizes.feed_forward(bias=True),
        image_width=sizes.whole("image_size", 224),
        patch_width=sizes.whole("patch_size", 16),
        channels=sizes.whole("num_channels", 3),
        classes=_classes(sizes),
    )


FAMILIES: dict[str, Callable[[Sizes], Model]] = {
    "bert": _bert,
    "deepseek_v3": decoders.deepseek_v3,
    "gemma": decoders.gemma,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": decoders.gpt_oss,
    "kimi_k2": decoders.deepseek_v3,
    "llama": decoders.llama,
    "mistral": decoders.mistral,
    "mixtral": decoders.mixtral,
    "mpt": _mpt,
    "opt": _opt,
    "phi3": decoders.phi3,
    "qwen2": decoders.qwen2,
    "qwen3": decoders.qwen3,
    "qwen3_moe": decoders.qwen3_moe,
    "resnet": _resnet,
    "roberta": _roberta,
    "t5": _t5,
    "vit": _vit,
}
"""Makers by a configuration's ``model_type``."""


def model_of(values: Mapping[str, object], name: str) -> Model:
    """Returns the sizes of a model from the values of its configuration.

    Raises UserError for no known ``model_type``, a size that is missing or no whole positive
    number, sizes that contradict each other, or an extension that is not modelled.
    """
    family = values.get("model_type")
    with naming(name):
        if str(family) not in FAMILIES:
            wrong = "model_type is missing" if family is None else f"unknown model_type {family!r}"
            raise UserError(f"{wrong}; known: {', '.join(FAMILIES)}")
        return FAMILIES[family](Sizes(values, name))


def read_values(path: Path | str) -> dict[str, object]:
    """Reads a ``config.json``, given by itself or by its folder. Raises UserError if it cannot."""
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} has a {type(values).__name__} where an object belongs")
    return values


def read_model(path: Path | str) -> Model:
    """Reads a model's ``config.json``. Raises UserError as ``read_values`` and ``model_of``."""
    return model_of(read_values(path), str(path))
