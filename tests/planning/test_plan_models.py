"""Models as plans see them: their samples, their blocks, and the lines that are printed of them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from command_line import ddplab
from torch import nn

from common.errors import UserError
from common.models.traced import block_paths, traced_architecture
from common.perfmodel.architectures.architecture import Architecture
from common.planning.code import python_lines
from common.planning.space import SHARDED, STRATEGIES, Plan, Question, candidates
from common.tuning.plans.measuring import sizes_to_time
from common.tuning.plans.planned_step import checkpointing_switch
from common.tuning.plans.sized_model import SizedModel, of_configuration

HERE = Path(__file__).parent
CPU = torch.device("cpu")
OF_A_TOKEN = 3 * 2 * 2 * 16 * 64 + 2 * 16 * 50
"""Operations of ``plan_models.Blocks``: two products in each of three blocks, and the head's."""


@pytest.mark.parametrize(
    ("function", "asked", "tokens"),
    [("make", 4, 8), ("no_common_dimension", 1, 4 * 8), ("sequence_first", 4, 8)],
)
def test_operations_are_those_of_a_sample_wherever_it_stands(
    function: str, asked: int, tokens: int
) -> None:
    model = SizedModel.load(f"plan_models:{function}", HERE, seed=0)
    assert model.architecture(asked, "cpu").forward_flops == tokens * OF_A_TOKEN


def test_the_command_for_a_cluster_sees_the_same_samples_and_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(HERE)
    flags = ("--cluster", "h100-ib", "--gpus", 2, "--global-batch", 4)
    steps = [
        re.search(r"a step of \S+ s", ddplab("plan", f"plan_models:{name}", *flags).stdout)[0]
        for name in ("make", "sequence_first")
    ]
    assert steps[0] == steps[1]


def test_a_batch_without_rows_is_refused_in_a_line() -> None:
    def made() -> tuple:
        return nn.Linear(2, 2), {"scale": torch.tensor(1.0)}, lambda module, batch: None

    with pytest.raises(UserError, match="model: its batch has no tensor with a sample in each row"):
        traced_architecture(made, "model")


@cache
def large() -> Architecture:
    return SizedModel.load("plan_models:large", HERE, seed=0).architecture(2, "cpu")


@pytest.mark.parametrize(
    ("free_bytes", "strategies", "sizes"),
    [
        (1e9, STRATEGIES, (4, 16)),
        (1e9, ("DDP",), (2, 8)),
        (9e6, SHARDED, (1, 4)),
        (1e7, ("DDP",), (1, 4)),
        (6e6, SHARDED, None),  # weights and gradients are 4.3 MB; FSDP gathers both beside its own
        (8e6, ("DDP",), None),  # AdamW's moments are 4.3 MB, too
    ],
)
def test_passes_are_timed_at_sizes_that_a_rank_can_hold_alone(free_bytes, strategies, sizes):
    question = Question(large(), 2, 2, 16, 1e9, ("float32",), "cpu", strategies)
    plans = list(candidates(question))
    if sizes:
        assert sizes_to_time(question, plans, free_bytes) == sizes
        return
    with pytest.raises(UserError, match=r"1 sample that takes 0.0\d+ GB, and 0.00\d+ GB are free"):
        sizes_to_time(question, plans, free_bytes)


def stages() -> nn.Module:
    """Makes a model whose blocks are in lists of a list."""
    model = nn.Module()
    model.stages = nn.ModuleList(
        nn.Sequential(nn.Linear(size, size), nn.Linear(size, size)) for size in (8, 16)
    )
    return model


def in_itself() -> nn.Module:
    """Makes a model that is the list of its blocks."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def in_a_list() -> nn.Module:
    """Makes a model with blocks under a name."""
    model = nn.Module()
    model.layers = in_itself()
    return model


@pytest.mark.parametrize(
    ("make", "printed"),
    [
        (in_a_list, "blocks = [*model.layers]"),
        (in_itself, "blocks = [*model]"),
        (stages, 'blocks = [*model.get_submodule("stages.0"), *model.get_submodule("stages.1")]'),
    ],
)
def test_printed_blocks_are_those_of_the_model(make, printed: str) -> None:
    model = make()

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        parts = getattr(module, "stages", None) or [getattr(module, "layers", module)]
        return sum(part(batch[:, : part[0].in_features]).sum() for part in parts)

    architecture = traced_architecture(lambda: (make(), torch.ones(2, 16), loss), "model")
    question = Question(architecture, 2, 2, 4, 1e9, device="cpu")
    lines = python_lines(question, Plan("FULL_SHARD", 2))
    [line] = [line for line in lines if line.startswith("blocks = ")]
    assert line == printed
    names: dict[str, object] = {"model": model}
    exec(line, names)
    assert names["blocks"] == [model.get_submodule(path) for path in block_paths(model)]


def test_printed_checkpointing_of_a_decoder_leaves_its_gradients_as_they_are(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    path.write_text(json.dumps({"model_type": "llama", "use_cache": True} | sizes | counts))
    model = of_configuration(str(path), 8, seed=0)
    plain, architecture = model.make(2, CPU), model.architecture(2, "cpu")
    plain.loss(plain.module.train(), plain.batch).backward()
    for kind in ("block", "selective"):
        user = model.make(2, CPU)
        switch = checkpointing_switch(user.module)
        question = Question(architecture, 1, 1, 2, 1e9, device="cpu", checkpointing_switch=switch)
        lines = python_lines(question, Plan("single", 2, checkpointing=kind))
        assert f"model.{switch}(" in "\n".join(lines)
        names = {"torch": torch, "model": user.module.train(), "batch": user.batch, "lr": 0.0}
        names["loss_of"] = user.loss
        exec("\n".join(line for line in lines if "zero_grad" not in line), names)
        for (name, expected), found in zip(
            plain.module.named_parameters(), user.module.parameters(), strict=True
        ):
            torch.testing.assert_close(found.grad, expected.grad, msg=name)
