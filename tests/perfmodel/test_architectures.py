"""Architectures against the models that transformers builds, and torch's count of operations."""

import csv
import json
from pathlib import Path

import pytest
import torch
import transformers
from refusals import problem
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from common.perfmodel.architectures.hugging_face import model_of, read_model
from common.perfmodel.architectures.published_sizes import SIZES, architecture_of
from common.perfmodel.one_device.architecture import CONFIGS
from common.perfmodel.one_device.flops import training_flops_per_token

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT.parent / "shared" / "measured" / "public-gpus" / "training.csv"
LENGTH = 32
WIDTHS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
BLOCKS = {**WIDTHS, "intermediate_size": 80}
OPT = {**WIDTHS, "ffn_dim": 80, "word_embed_proj_dim": 64}
T5 = {"d_model": 64, "d_ff": 80, "num_heads": 4, "vocab_size": 96}
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
    "GPTNeoXForCausalLM": BLOCKS,
    "OPTForCausalLM": OPT,
    "OPTForCausalLM norms after": {**OPT, "do_layer_norm_before": False},
    "MptForCausalLM": {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 96},
    "BertModel": BLOCKS,
    "BertForMaskedLM": BLOCKS,
    "BertForPreTraining": BLOCKS,
    "BertForQuestionAnswering": BLOCKS,
    "RobertaModel": BLOCKS,
    "RobertaForMaskedLM": BLOCKS,
    "ViTForImageClassification": {
        **{key: value for key, value in BLOCKS.items() if key != "vocab_size"},
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 7,
    },
    "ResNetForImageClassification": {
        "embedding_size": 8,
        "hidden_sizes": [32, 64, 64],
        "depths": [2, 1, 3],
        "num_labels": 7,
        "image_size": 30,
    },
    "ResNetForImageClassification basic": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [2, 2],
        "layer_type": "basic",
        "downsample_in_first_stage": True,
        "image_size": 30,
    },
    "ResNetForImageClassification halves first": {
        "embedding_size": 8,
        "hidden_sizes": [16, 32],
        "depths": [1, 2],
        "downsample_in_bottleneck": True,
        "image_size": 30,
    },
    "T5ForConditionalGeneration": {**T5, "d_kv": 24, "num_layers": 3, "num_decoder_layers": 2},
    "T5ForConditionalGeneration gated": {
        **T5,
        "d_kv": 16,
        "num_layers": 1,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}
"""Sizes for configuration classes of transformers, by the class of the model."""
WITH_EXPERTS = [name for name, sizes in SMALL.items() if "num_experts_per_tok" in sizes]
LOOP = {"_experts_implementation": "eager"}


def model_and_architecture(name, sizes, device="meta", **kinds):
    """Returns a model of transformers, and the architecture that is read from its configuration."""
    kind = getattr(transformers, name.split()[0])
    config = kind.config_class(**sizes)
    for key, value in kinds.items():
        setattr(config, key, value)
    with torch.device(device):
        model = kind(config)
    values = config.to_dict() | {"architectures": [name.split()[0]]}
    return model, model_of(values, name).architecture(None if "Image" in name else LENGTH)


def registered(name, model):
    """Returns names and parameters as they are registered, but OPT's last norm behind its blocks,
    which run before it."""
    parameters = list(model.named_parameters())
    last = [item for item in parameters if "decoder.final_layer_norm" in item[0]]
    rest = [item for item in parameters if "decoder.final_layer_norm" not in item[0]]
    return rest + last


def inputs(name, samples, device="meta"):
    if "Image" in name:
        width = SMALL[name]["image_size"]
        return {"pixel_values": torch.rand(samples, 3, width, width, device=device)}
    tokens = torch.arange(samples * LENGTH, device=device).reshape(samples, LENGTH) % 90 + 2
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if "T5" in name else {})


@pytest.mark.parametrize("name", SMALL)
def test_shapes_and_their_order_are_those_of_the_models_of_transformers(name):
    model, architecture = model_and_architecture(name, SMALL[name])
    expected = registered(name, model)
    ours = [tensor for layer in architecture.one_by_one() for tensor in layer.tensors]
    assert [tensor.shape for tensor in ours] == [
        tuple(parameter.shape) for _, parameter in expected
    ]
    # A parameter that we call a bias is one.
    biases = [tensor.name.endswith("bias") for tensor in ours]
    assert biases == [parameter.endswith("bias") for parameter, _ in expected]
    assert architecture.num_parameters == sum(p.numel() for p in model.parameters())


# On the meta device every attention is written out as two batched products, also sdpa's, with key
# and value heads repeated for their groups: the counter then counts all of them, causal or not.
@pytest.mark.parametrize("name", [name for name in SMALL if name not in WITH_EXPERTS])
def test_forward_operations_are_those_that_torch_counts(name):
    model, architecture = model_and_architecture(name, SMALL[name])
    assert counted(model, inputs(name, samples=3)) == 3 * architecture.forward_flops


# Which experts a token goes to follows from values, so these run on the CPU, whose kernel of fused
# attention is counted whole as well. Experts run in a loop: a grouped product is not counted.
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_active_experts_operations_are_those_that_torch_counts(name):
    model, architecture = model_and_architecture(name, SMALL[name], device="cpu", **LOOP)
    assert counted(model, inputs(name, 2, "cpu")) == 2 * architecture.forward_flops


# Hooks note when each gradient is final in a real backward pass.
@pytest.mark.parametrize("name", SMALL)
def test_gradients_become_ready_in_the_order_of_the_architecture(name):
    kinds = LOOP if name in WITH_EXPERTS else {}
    model, architecture = model_and_architecture(name, SMALL[name], device="cpu", **kinds)
    parameters, real = registered(name, model), []
    for place, (_, parameter) in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, place=place: real.append(place))
    outputs = model(**inputs(name, 2, "cpu")).to_tuple()
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    sum(tensor.pow(2).sum() for tensor in tensors if tensor.requires_grad).backward()
    assert len(real) == len(parameters)
    assert architecture.ready_order() == real


def counted(model, values):
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(**values)
    return counter.get_total_flops()


PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-34b": 33_743_970_304,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-neox-20b": 20_554_567_680,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
}
"""Parameters of the published weights."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_parameters_of_the_published_weights(name):
    architecture = architecture_of(name, None if name.startswith("vit") else 256)
    assert architecture.num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", [n for n in SIZES if n not in PUBLISHED and "mpt" not in n])
def test_other_sizes_have_the_parameters_of_the_models_that_transformers_builds(name):
    values = SIZES[name].values(None)
    if "id2label" in values:
        values["num_labels"] = len(values.pop("id2label"))
    config = transformers.AutoConfig.for_model(**values)
    kinds = {
        "bert": (config.architectures or ["BertModel"])[0],
        "t5": "T5ForConditionalGeneration",
        "vit": "ViTForImageClassification",
    }
    kind = getattr(transformers, kinds.get(config.model_type, "AutoModelForCausalLM"))
    with torch.device("meta"):
        model = getattr(kind, "from_config", kind)(config)
    architecture = architecture_of(name, None if name.startswith("vit") else 256)
    assert architecture.num_parameters == sum(p.numel() for p in model.parameters())


# transformers has MPT without biases and with ALiBi; the published table says what was trained.
def test_mpt_has_the_parameters_of_the_published_table():
    if not ROWS.exists():
        pytest.skip("needs the published measurements, which are not part of the project")
    with ROWS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"].startswith("MPT")]
    assert len(rows) > 50
    for row in rows:
        architecture = architecture_of(row["model"].lower(), int(row["seq_len"]))
        assert round(architecture.num_parameters / 1e6, 1) == float(row["params_m"]), row["model"]


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_gpt2_has_the_operations_of_its_own_formula(name):
    config = CONFIGS[name]
    per_token = training_flops_per_token(config, 1024)
    assert 3 * config.architecture(1024).forward_flops == 1024 * per_token
    published = architecture_of(name, 1024)
    assert published.forward_flops == config.architecture(1024).forward_flops
    assert published.parameter_sizes() == config.parameter_sizes()


def test_grouped_layers_stand_for_single_ones():
    architecture = architecture_of("deepseek-v3", 64)
    assert [layer.count for layer in architecture.blocks] == [3, 58]
    assert len(list(architecture.one_by_one())) == 1 + 61 + 1 + 1
    sizes = architecture.parameter_sizes()
    assert sum(sizes) == architecture.num_parameters
    assert sorted(architecture.ready_order()) == list(range(len(sizes)))


GOOD = {"model_type": "llama", **{key: value for key, value in LLAMA.items() if "pad" not in key}}


def folder(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    return str(tmp_path)


def test_a_configuration_is_read_from_its_file_or_its_folder(tmp_path):
    path = folder(tmp_path, json.dumps(GOOD))
    layers = model_of(GOOD, "in memory").architecture(8).layers
    assert layers == architecture_of(path, 8).layers
    assert layers == architecture_of(f"{path}/config.json", 8).layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type is missing; known: bert, deepseek_v3"),
        ({"model_type": "mamba"}, "unknown model_type 'mamba'; known: bert, deepseek_v3"),
        ({"model_type": ["llama"]}, "unknown model_type ['llama']; known"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be a whole number, at least 1"),
        ({"vocab_size": 3.5}, "vocab_size is 3.5; it must be a whole number"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is 3; it must be a whole number"),
        ({"num_hidden_layers": 10**7}, "it must be a whole number from 1 to 10000"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole number"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 key-value heads"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; it must be true or false"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "3 active experts are more than the 2 there are",
        ),
        ({"model_type": "mixtral", "num_local_experts": 2}, "num_experts_per_tok is missing"),
        ({"model_type": "gpt2", "n_embd": 8}, "n_layer is missing"),
        ({"model_type": "opt", "ffn_dim": 8, "word_embed_proj_dim": 8}, "word_embed_proj_dim 8"),
        (
            {"model_type": "bert", "architectures": ["BertLMHeadModel"]},
            "unknown architecture 'BertLMHeadModel'; did you mean",
        ),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"model_type": "qwen3"}, "head_dim is missing"),
        (
            {"model_type": "mpt", "attn_config": {"attn_type": "multiquery_attention"}},
            "attn_type 'multiquery_attention' is not modelled",
        ),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder is not modelled"),
        ({"model_type": "vit", "patch_size": 15}, "224 pixels are no multiple of a patch's 15"),
        ({"model_type": "resnet", "depths": [3, 4]}, "4 hidden_sizes for 2 depths"),
        ({"model_type": "resnet", "depths": [3, 4, 0, 1]}, "depths is 0; it must be a whole"),
        ({"model_type": "resnet", "layer_type": "wide"}, "layer_type 'wide'"),
        ({"model_type": "resnet", "hidden_act": "gelu"}, "hidden_act 'gelu' is not modelled"),
        ({"model_type": "resnet"}, "takes images, which have no length of 8 tokens"),
        ({"model_type": "mpt", "attn_config": 3}, "attn_config is 3; it must be an object"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused_in_one_line(tmp_path, change, message):
    values = {key: value for key, value in (GOOD | change).items() if value is not None}
    path = folder(tmp_path, json.dumps(values))
    line = problem(lambda: read_model(path).architecture(8))
    assert line.startswith(path)
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no JSON"), ("[1]", "has a list where an object belongs"), ("\xff", "no JSON")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_model(folder(tmp_path, text)).architecture(8)


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        (str(ROOT), 8, "cannot read .*config.json: No such file"),
        ("absent.json", 8, "cannot read absent.json: No such file"),
        ("absent/model", 8, "cannot read absent/model: No such file"),
        ("llama-3-9b", 8, "unknown model 'llama-3-9b'; did you mean 'llama-3-8b'"),
        ("bert-base", 513, "bert-base has 512 learned positions, fewer than 513"),
        ("llama-3-8b", 0, "sequence length is 0; it must be a whole number"),
        ("mpt-7b", None, "sequence length is None; it must be a whole number"),
        ("vit-base", 512, "vit-base has 197 tokens an image, not 512"),
    ],
)
def test_a_missing_file_an_unknown_name_and_a_wrong_length_are_refused(name, length, message):
    with pytest.raises(UserError, match=message):
        architecture_of(name, length)
