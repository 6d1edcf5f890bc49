"""Cases of ``ddplab study models``: training steps of models of transformers, of several families.

A case is *fitted* where predictions of other models' steps were chosen on it, and *held out*
otherwise; both were written down before the first measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.perfmodel.one_device.workload import Workload
from common.settings import AtLeast, Settings


@dataclass(frozen=True)
class ModelCase(Settings):
    """A training step of a model of transformers.

    Attributes:
        name: name of the case.
        config: JSON object of the model's configuration, as in ``config.json``.
        seq_len: tokens of a sequence; 0 for images.
        checkpointing: whether each block keeps its input only.
        held_out: whether no prediction was fitted to the case.
    """

    name: str
    config: dict
    batch_size: Annotated[int, AtLeast(1)]
    seq_len: int = 0
    precision: str = "bfloat16"
    tf32: bool = False
    compile: bool = False
    checkpointing: bool = False
    held_out: bool = False

    def workload(self) -> Workload:
        """Returns the options of the step; the model of the workload is not used."""
        return Workload(
            batch_size=self.batch_size,
            precision=self.precision,
            tf32=self.tf32,
            compile=self.compile,
            optimizer_implementation="fused",
        )


def llama(hidden: int, layers: int, heads: int, wide: int, kv_heads: int = 0) -> dict:
    """Returns the configuration of a Llama with the vocabulary of Llama 2."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": wide,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
    }


def bert(hidden: int, layers: int, heads: int) -> dict:
    """Returns the configuration of a BERT without dropout."""
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


RESNET_50 = {"model_type": "resnet", "num_labels": 1000}
VIT_BASE = {"model_type": "vit", "num_labels": 1000}
T5_BASE = {
    "model_type": "t5",
    "d_model": 768,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
PYTHIA_410M = {
    "model_type": "gpt_neox",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 50_304,
    "max_position_embeddings": 2048,
}
OF_1B, OF_7B = llama(2048, 16, 32, 8192, 8), llama(4096, 4, 32, 11_008)
GPU_CASES = (
    ModelCase("llama-768", llama(768, 12, 12, 3072), 8, 2048),
    ModelCase("llama-1024", llama(1024, 24, 16, 4096), 8, 2048, held_out=True),
    ModelCase("llama-2048", OF_1B, 4, 2048),
    ModelCase("llama-2048-batch-1", OF_1B, 1, 2048, held_out=True),
    ModelCase("llama-4096", OF_7B, 2, 4096),
    ModelCase("llama-5120", llama(5120, 3, 40, 13_824), 2, 4096, held_out=True),
    ModelCase("llama-8192", llama(8192, 2, 64, 28_672, 8), 2, 4096),
    ModelCase("llama-2048-checkpointing", OF_1B, 4, 2048, checkpointing=True),
    ModelCase("llama-4096-checkpointing", OF_7B, 2, 4096, checkpointing=True, held_out=True),
    ModelCase("llama-768-compiled", llama(768, 12, 12, 3072), 8, 2048, compile=True),
    ModelCase("llama-4096-compiled", OF_7B, 2, 4096, compile=True, held_out=True),
    ModelCase("llama-2048-tf32", OF_1B, 2, 2048, "float32", tf32=True),
    ModelCase("pythia-410m", PYTHIA_410M, 8, 2048, held_out=True),
    ModelCase("bert-large", bert(1024, 24, 16), 32, 512),
    ModelCase("bert-large-tf32", bert(1024, 24, 16), 16, 512, "float32", tf32=True),
    ModelCase("bert-large-float32", bert(1024, 24, 16), 8, 512, "float32"),
    ModelCase("bert-base", bert(768, 12, 12), 32, 384, held_out=True),
    ModelCase("bert-base-float32", bert(768, 12, 12), 16, 384, "float32", held_out=True),
    ModelCase("t5-base", T5_BASE, 16, 512, held_out=True),
    ModelCase("resnet-50-float32", RESNET_50, 64, precision="float32"),
    ModelCase("resnet-50-tf32", RESNET_50, 128, precision="float32", tf32=True, held_out=True),
    ModelCase("resnet-50", RESNET_50, 128),
    ModelCase("vit-base", VIT_BASE, 64, held_out=True),
    ModelCase("vit-base-tf32", VIT_BASE, 64, precision="float32", tf32=True),
)
SMALL_BERT = {**bert(192, 2, 4), "vocab_size": 2000, "max_position_embeddings": 64}
SMALL_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "num_labels": 10,
}
CPU_CASES = (
    ModelCase("llama", {**llama(192, 2, 4, 512, 2), "vocab_size": 2000}, 2, 64, "float32"),
    ModelCase("bert", SMALL_BERT, 2, 64, "float32", held_out=True),
    ModelCase("resnet", SMALL_RESNET, 2, precision="float32"),
)
CASES = {"cpu": CPU_CASES, "cuda": GPU_CASES}
