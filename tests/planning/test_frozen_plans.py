"""Plans of models of which a part is frozen, against autograd, torch's counters and real steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import ddplab, refused
from plan_models import (
    PARTLY_FROZEN,
    Blocks,
    adapted,
    last_block,
    loss_of,
    probed,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from common.models.traced import traced_architecture
from common.perfmodel.architectures.activations import CPU, Numerics
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.fsdp.schedule import Exchange, ShardedModel
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.training_memory import Passes, predict_training_memory
from common.planning.measured_times import collectives_of
from common.planning.space import Plan, Question
from common.training.recording.memory_watch import AllocationWatch

HERE = Path(__file__).parent
SAMPLES, TOKENS = 4, 64
AUTOCAST = Numerics("autocast", device=CPU)
CASES = [(adapted, Plan(name, 2)) for name in ("FULL_SHARD", "SHARD_GRAD_OP", "DDP")]
CASES += [(last_block, Plan("FULL_SHARD", 2, 2))]
CASES += [(last_block, Plan(name, 2)) for name in ("FULL_SHARD", "SHARD_GRAD_OP")]
CASES += [(probed, Plan(name, 2)) for name in ("FULL_SHARD", "DDP")]
CASES += [(adapted, Plan("FULL_SHARD", 2, blocks_per_unit=2))]
CASES += [(make, Plan("DDP", 2, 1, "block")) for make in (adapted, last_block)]
CASES += [(adapted, Plan("FULL_SHARD", 2, prefetch=ahead)) for ahead in (0, 2)]
partly_frozen = pytest.mark.parametrize(
    "make",
    [PARTLY_FROZEN[0], *(pytest.param(m, marks=pytest.mark.slow) for m in PARTLY_FROZEN[1:])],
)


@cache
def followed(make: Callable[..., nn.Module], samples: int = SAMPLES) -> Architecture:
    def made() -> tuple:
        return make(4, 128), torch.randint(50, (samples, TOKENS)), loss_of

    return traced_architecture(made, "made", "cpu")


def elements(module: nn.Module, trained: bool) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


@partly_frozen
@pytest.mark.parametrize(
    "strategy",
    ["FULL_SHARD", *(pytest.param(s, marks=pytest.mark.slow) for s in ("none", "DDP", "ZERO1"))],
)
def test_gradients_and_states_are_those_of_what_is_trained(make, strategy: str) -> None:
    architecture, module = followed(make), make(4, 128)
    every, trained = elements(module, False), elements(module, True)
    assert (architecture.num_parameters, architecture.num_trained) == (every, trained)
    assert sum(architecture.parameter_sizes()) == trained
    assert sorted(architecture.ready_order()) == list(range(len(architecture.parameter_sizes())))
    ranks = 1 if strategy == "none" else 2
    sharding = Sharding(strategy, ranks)
    update = predict_training_memory(Passes(architecture, SAMPLES), sharding).at("update")
    sizes = update.components
    shards = 2 if strategy == "FULL_SHARD" else 1
    assert sizes["parameters"] == pytest.approx(4 * every / shards, abs=1)
    assert sizes["gradients"] == pytest.approx(4 * trained / shards, abs=1)
    if strategy != "ZERO1":
        assert sizes["optimizer states"] == pytest.approx(8 * trained / shards, abs=1)
    assert sizes.get("communication", 0) == (4 * trained if ranks > 1 == shards else 0)


@partly_frozen
def test_operations_are_those_that_torch_counts(make) -> None:
    architecture = followed(make)
    module, tokens = make(4, 128), torch.randint(50, (SAMPLES, TOKENS))
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(module, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert SAMPLES * architecture.forward_flops == forward.get_total_flops()
    assert SAMPLES * architecture.backward_flops == pytest.approx(backward.get_total_flops())


@pytest.mark.parametrize(
    ("make", "samples", "half"),
    [
        (adapted, 16, True),  # followed with four
        *(
            pytest.param(make, *case, marks=pytest.mark.slow)
            for make in PARTLY_FROZEN
            for case in ((4, True), (4, False), (16, True), (16, False))
            if (make, case) != (adapted, (16, True))
        ),
    ],
)
def test_the_peak_is_the_allocators(make, samples: int, half: bool) -> None:
    passes = Passes(
        followed(make), samples, Numerics("autocast" if half else "float32", device=CPU)
    )
    module, tokens = make(4, 128), torch.randint(50, (samples, TOKENS))
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    # By PyTorch's own kernels: oneDNN's allocate as the processor's instructions let them.
    with torch.backends.mkldnn.flags(enabled=False):
        for watched in (False, True):
            watch = AllocationWatch(module, optimizer, tokens) if watched else None
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = loss_of(module, tokens)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    predicted = predict_training_memory(passes).peak_bytes
    # A copy of a frozen weight that is gone at once may be there at the peak of other samples.
    within = {probed: 0.03, adapted: 0.002}.get(make, 0.0003) if half else 0.0003
    assert predicted == pytest.approx(watch.finish(), rel=within)


def test_copies_that_a_module_held_are_not_taken_for_those_of_other_settings() -> None:
    """They were seen without sharding and checkpointing."""
    seen = followed(adapted)
    layers = [
        replace(layer, activations=replace(layer.activations, fixed=())) for layer in seen.layers
    ]
    without = replace(seen, layers=tuple(layers))
    peaks = [
        [
            predict_training_memory(Passes(architecture, 64, AUTOCAST, checkpointing), sharding)
            for checkpointing, sharding in (
                ("none", Sharding("none", 1)),
                ("block", Sharding("none", 1)),
                ("none", Sharding("FULL_SHARD", 2)),
            )
        ]
        for architecture in (seen, without)
    ]
    assert [one == other for one, other in zip(*peaks, strict=True)] == [False, True, True]


def test_layers_below_the_first_trained_parameter_have_no_backward_pass() -> None:
    layers = {layer.name: layer for layer in followed(last_block).layers}
    below, last = layers["blocks.0"], layers["blocks.3"]
    assert (below.count, last.count) == (3, 1)
    assert (layers["embedding"].has_backward, below.has_backward) == (False, False)
    assert last.backward_ratio == 2
    assert layers["head"].backward_ratio == 2
    assert list(layers) == ["embedding", "blocks.0", "blocks.3", "head"]


def test_a_trunk_that_runs_without_gradients_stands_before_the_head() -> None:
    class Probe(Blocks):
        def forward(self, tokens: Tensor) -> Tensor:
            with torch.no_grad():
                hidden = self.embedding(tokens)
                for block in self.blocks:
                    hidden = block(hidden)
            return self.head(hidden)

    def made() -> tuple:
        module = Probe().requires_grad_(False)
        module.head.requires_grad_(True)
        return module, torch.randint(50, (2, 8)), loss_of

    layers = traced_architecture(made, "made", "cpu").layers
    assert [layer.name for layer in layers] == ["embedding", "blocks.0", "head"]
    assert [layer.has_backward for layer in layers] == [False, False, True]


def test_a_tied_weight_is_frozen_as_embedding_and_as_head() -> None:
    def made() -> tuple:
        module = Blocks()
        module.head.weight = module.embedding.weight
        module.embedding.requires_grad_(False)
        return module, torch.randint(50, (2, 8)), loss_of

    architecture, module = traced_architecture(made, "made", "cpu"), made()[0]
    assert architecture.num_parameters == elements(module, False)
    assert architecture.num_trained == elements(module, True)
    assert predict_training_memory(Passes(architecture, 2)).peak_bytes > 0


def test_the_command_says_how_much_is_trained_and_refuses_what_it_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(HERE)
    flags = ("--cluster", "h100-ib", "--gpus", 2, "--global-batch", 4)
    printed = ddplab("plan", "plan_models:adapters", *flags).stdout
    assert re.search(r"parameters \(0\.0\d+M trained\), on 2 × ", printed)
    assert "AdamW(trained, lr=lr" in printed or "ZeroRedundancyOptimizer(trained," in printed
    assert "no parameter of the module requires a gradient" in refused(
        "plan", "plan_models:all_frozen", *flags
    )
    assert "1 of its 1 frozen parameters are torch.bfloat16" in refused(
        "plan", "plan_models:frozen_in_half", *flags
    )


def test_no_unit_is_gathered_for_a_backward_pass_that_it_does_not_have() -> None:
    zero, second = np.zeros(1), np.ones(1)
    passes = dict.fromkeys(("root", "below", "above"), zero)
    calls = {(name, unit): zero for name in ("all_gather", "reduce_scatter") for unit in passes}
    gathers = {("all_gather", unit): second for unit in ("below", "above")}
    model = ShardedModel(("below", "above"), passes, passes, calls | gathers, calls)
    exchange = Exchange(root=True, forward=True, backward=True, reduce=True)
    forward_only = replace(model, forward_only=frozenset({"below"}))
    assert model.simulate(exchange, np.ones(1)).total_s == 4
    assert forward_only.simulate(exchange, np.ones(1)).total_s == 3


def test_a_module_that_is_called_rest_has_its_own_backward_pass() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16).requires_grad_(False)
            self.rest, self.head = nn.Linear(16, 16), nn.Linear(16, 50)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.rest(self.embedding(tokens)))

    def made() -> tuple:
        return Named(), torch.randint(50, (2, 8)), loss_of

    layers = traced_architecture(made, "made", "cpu").layers
    assert [layer.backward_ratio for layer in layers] == [0, 1, 2]


def test_units_are_gathered_as_often_as_their_backward_pass_asks_for() -> None:
    question = Question(followed(last_block), 2, 2, 4, 1e9, device="cpu")
    # Of frozen units as many are gathered in vain as are gathered ahead; one that has a trained
    # block, too, is gathered again with it, and counts as two.
    expected = [(Plan("FULL_SHARD", 2, prefetch=n), [3 + n, 2, 1]) for n in (0, 1, 2)]
    expected += [
        (Plan("FULL_SHARD", 2, blocks_per_unit=2), [2, 2, 2, 1]),
        (Plan("FULL_SHARD", 2, blocks_per_unit=4), [2, 2, 1]),
        (Plan("SHARD_GRAD_OP", 2, blocks_per_unit=4), [1, 1, 1]),
    ]
    for plan, counts in expected:
        calls = collectives_of(question, plan)
        assert [call.count for call in calls if call.operation == "all_gather"] == counts, plan


@pytest.mark.slow
@pytest.mark.two_ranks
def test_real_steps_take_the_memory_and_send_the_bytes_that_are_predicted(rank_server, tmp_path):
    worker = HERE / "frozen_worker.py"
    named = [f"{make.__name__} {plan!r}" for make, plan in CASES]
    done = rank_server.run(worker, tmp_path, *named, ranks=2, timeout_s=120)
    assert done.exit_codes == [0, 0], done.stderr[0]
    for line in done.lines():
        if "DDP" not in line["case"]:
            assert line["sent"] == line["payload"] + line["control"], line
        # Of a unit above a frozen trunk FSDP reduces last, beside one that it gathered in vain.
        alone = line["case"].startswith("last_block") and "accumulation=1" in line["case"]
        within = 0.05 if alone else 0.02
        assert line["predicted"] == pytest.approx(line["peak"], rel=within), line


@pytest.mark.slow
@pytest.mark.two_ranks
@pytest.mark.parametrize("make", [adapted, last_block])
def test_printed_lines_train_what_is_trained_and_leave_what_is_frozen(rank_server, make):
    plans = [Plan(name, 2, 2) for name in ("DDP", "ZERO1", "SHARD_GRAD_OP", "FULL_SHARD")]
    plans += [Plan("FULL_SHARD", 2, 1, "block"), Plan("DDP", 2, 2, "selective")]
    arguments = (make.__name__, *map(repr, plans))
    done = rank_server.run(HERE / "plan_models.py", *arguments, ranks=2)
    assert done.exit_codes == [0, 0], done.stderr[0]
