"""Architectures against the models that transformers builds, and torch's count of operations."""

import csv
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from common.perfmodel.architectures.hugging_face import model_of, read_config
from common.perfmodel.architectures.published_sizes import SIZES, architecture_of
from common.perfmodel.one_device.architecture import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT.parent / "shared" / "measured" / "public-gpus" / "training.csv"
LENGTH = 32
WIDTHS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
LLAMA = {**WIDTHS, "num_key_value_heads": 2, "intermediate_size": 80, "pad_token_id": 0}
WIDE = {**LLAMA, "head_dim": 24}
SMALL = {
    "LlamaForCausalLM": LLAMA,
    "LlamaForCausalLM biases": {**WIDE, "attention_bias": True, "mlp_bias": True},
    "LlamaForCausalLM tied": {**LLAMA, "tie_word_embeddings": True},
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": WIDE,
    "Qwen3MoeForCausalLM": {
        **WIDE,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [2],
    },
    "GemmaForCausalLM": WIDE,
    "Phi3ForCausalLM": LLAMA,
    "GptOssForCausalLM": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {
        **WIDTHS,
        "intermediate_size": 80,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 40,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    },
    "DeepseekV3ForCausalLM whole queries": {
        **WIDTHS,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 80,
        "q_lora_rank": None,
    },
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 96},
    "GPTNeoXForCausalLM": {**WIDTHS, "intermediate_size": 80},
    "OPTForCausalLM": {**WIDTHS, "ffn_dim": 80, "word_embed_proj_dim": 64},
    "OPTForCausalLM norms after": {
        **WIDTHS,
        "ffn_dim": 80,
        "word_embed_proj_dim": 64,
        "do_layer_norm_before": False,
    },
    "MptForCausalLM": {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 96},
    "BertModel": {**WIDTHS, "intermediate_size": 80},
    "BertForMaskedLM": {**WIDTHS, "intermediate_size": 80},
    "BertForPreTraining": {**WIDTHS, "intermediate_size": 80},
    "BertForQuestionAnswering": {**WIDTHS, "intermediate_size": 80},
    "RobertaModel": {**WIDTHS, "intermediate_size": 80},
    "RobertaForMaskedLM": {**WIDTHS, "intermediate_size": 80},
    "ViTForImageClassification": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 7,
    },
    "T5ForConditionalGeneration": {
        "d_model": 64,
        "d_kv": 24,
        "d_ff": 80,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "vocab_size": 96,
    },
    "T5ForConditionalGeneration gated": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 80,
        "num_layers": 1,
        "num_heads": 4,
        "vocab_size": 96,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}
"""Sizes for configuration classes of transformers, by the class of the model."""


def model_and_architecture(name, sizes, device="meta", **kinds):
    """Returns a model of transformers, and the architecture that is read from its configuration."""
    kind = getattr(transformers, name.split()[0])
    config = kind.config_class(**sizes)
    for key, value in kinds.items():
        setattr(config, key, value)
    with torch.device(device):
        model = kind(config)
    values = config.to_dict() | {"architectures": [name.split()[0]]}
    return model, model_of(values, name).architecture(None if "ViT" in name else LENGTH)


def inputs(name, samples, device="meta"):
    if name.startswith("ViT"):
        return {"pixel_values": torch.zeros(samples, 3, 32, 32, device=device)}
    tokens = torch.arange(samples * LENGTH, device=device).reshape(samples, LENGTH) % 90 + 2
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if "T5" in name else {})


@pytest.mark.parametrize("name", SMALL)
def test_shapes_and_their_order_are_those_of_the_models_of_transformers(name):
    model, architecture = model_and_architecture(name, SMALL[name])
    expected = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    if "OPT" in name:  # it registers its last norm before its blocks, which run before it
        last = [item for item in expected if "decoder.final_layer_norm" in item[0]]
        expected = [item for item in expected if item not in last] + last
    ours = [tensor for layer in architecture.one_by_one() for tensor in layer.tensors]
    assert [tensor.shape for tensor in ours] == [shape for _, shape in expected]
    # A parameter that we call a bias is one.
    biases = [tensor.name.endswith("bias") for tensor in ours]
    is_scores = [one.endswith("bias") for one, _ in expected]
    assert biases == is_scores or "T5" in name  # relative_attention_bias.weight is a matrix
    assert architecture.num_parameters == sum(p.numel() for p in model.parameters())


# On the meta device every attention is written out as two batched products, also sdpa's, with key
# and value heads repeated for their groups: the counter then counts all of them, causal or not.
@pytest.mark.parametrize("name", [name for name in SMALL if "experts" not in str(SMALL[name])])
def test_forward_operations_are_those_that_torch_counts(name):
    model, architecture = model_and_architecture(name, SMALL[name])
    assert counted(model, inputs(name, samples=3)) == 3 * architecture.forward_flops


# Which experts a token goes to follows from values, so these run on the CPU. Its kernel of fused
# attention is not counted, hence eager; experts in a loop, as a grouped product is not counted.
@pytest.mark.parametrize("name", [name for name in SMALL if "experts" in str(SMALL[name])])
def test_active_experts_operations_are_those_that_torch_counts(name):
    kinds = {"_attn_implementation": "eager", "_experts_implementation": "eager"}
    model, architecture = model_and_architecture(name, SMALL[name], device="cpu", **kinds)
    assert counted(model, inputs(name, 2, "cpu")) == 2 * architecture.forward_flops


def counted(model, values):
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(**values)
    return counter.get_total_flops()
