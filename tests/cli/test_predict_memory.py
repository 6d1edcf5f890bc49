"""``ddplab predict --model`` without a cluster: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import answered, refused

MODEL = ("--model", "llama-3.1-8b", "--seq-len", 2048, "--batch-size", 1)


def predict(*arguments: object) -> str:
    """Returns what ``ddplab predict`` prints."""
    return answered("predict", *arguments)


def test_parts_add_up_to_the_peak_and_states_are_sixteen_bytes_a_parameter() -> None:
    rows = dict(re.findall(r"^ +([a-z -]+?) +([\d.]+) *$", predict(*MODEL), re.MULTILINE))
    sizes = {part: float(size) for part, size in rows.items()}
    peak = sizes.pop("peak")
    assert sum(sizes.values()) == pytest.approx(peak, abs=0.01)
    assert sizes["parameters"] == pytest.approx(4 * 8.03, rel=0.001)
    assert sizes["optimizer states"] == pytest.approx(8 * 8.03, rel=0.001)


def test_sharding_over_more_gpus_fits_a_larger_micro_batch() -> None:
    options = ("--gpus", "4,64", "--strategies", "FULL_SHARD", "--capacity-gb", 80)
    [line] = re.findall(r"80 GB +(\d+) +(\d+)", predict(*MODEL, *options))
    assert 0 < int(line[0]) < int(line[1])


def test_checkpointing_and_a_configuration_of_ones_own(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    values = {"model_type": "bert", "intermediate_size": 3072, "max_position_embeddings": 512}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"vocab_size": 30522, **sizes, **values}))
    options = ("--model", file, "--seq-len", 512, "--batch-size", 64, "--capacity-gb", 24)
    largest = [
        int(re.search(r"24 GB +([\d,]+)", predict(*options, "--checkpointing", again))[1])
        for again in ("none", "block")
    ]
    assert largest[0] < largest[1]


def test_cards_have_gib_and_the_flag_gb() -> None:
    flags = ("--model", "gpt2", "--seq-len", 128, "--checkpointing", "block")
    usual = re.findall(r"card of 80 GiB +([\d,]+)", predict(*flags))
    answer = predict(*flags, "--capacity-gb", 80 * 2**30 / 1e9, 80)
    same, less = re.findall(r"8[\d.]+ GB +([\d,]+)", answer)
    assert usual == [same]
    assert int(less.replace(",", "")) < int(same.replace(",", ""))


def test_a_text_has_at_most_the_positions_of_its_model() -> None:
    assert "sequences of 512 tokens" in predict("--model", "bert-base")
    assert "sequences of 256 tokens" in predict("--model", "gpt2-nano")
    assert "sequences of 1024 tokens" in predict("--model", "llama-3.1-8b")


def test_images_need_no_length() -> None:
    assert "8 samples" in predict("--model", "vit-base")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt2", "--mfu", 0.5), "--mfu has an effect with --cluster only"),
        (("--model", "gpt2", "--csv", "x.csv"), "with --cluster or --gradient-mib only"),
        (("--model", "gpt2", "--alpha-us", 5), "--alpha-us has no effect with --model"),
        (("--model", "gpt2", "--strategies", "DDP"), "--strategies has an effect on several"),
        (("--model", "gpt2", "--capacity-gb", -1), "--capacity-gb -1: above 0 and finite"),
        (("--model", "gpt2", "--seq-len", 0), "sequence length"),
        (("--model", "gpt2", "--checkpointing", "all"), "unknown checkpointing 'all'"),
        (("--capacity-gb", 80), "--capacity-gb has an effect with --model only"),
        (
            ("--model", "gpt2", "--cluster", "h100-ib", "--gpus", 8, "--capacity-gb", 80),
            "--capacity-gb has no effect with --cluster",
        ),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple, message: str) -> None:
    assert message in refused("predict", *arguments)
