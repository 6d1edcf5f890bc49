"""MODULE:FUNCTION: what keeps the contract, and one clear line for each way not to."""

from __future__ import annotations

import inspect
from pathlib import Path
from unittest import mock

import pytest
import torch
import tuned_models
from refusals import problem
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.tuning.ddp_setting import DEFAULT, DdpSetting
from common.tuning.tune_settings import parse_target
from common.tuning.user_model import TrainedPart, followed_model, load_user_model, ready_order

HERE = Path(__file__).parent
CPU = torch.device("cpu")


def refusal(target: str, folder: Path = HERE) -> str:
    """Returns the line with which loading the model, or its first pass, is refused."""
    return problem(lambda: ready_order(load_user_model(target, folder, CPU), CPU))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model", "is not MODULE:FUNCTION"),
        ("model:", "is not MODULE:FUNCTION"),
        (":make", "is not MODULE:FUNCTION"),
        ("a b:make", "is not MODULE:FUNCTION"),
        ("model:make:again", "is not MODULE:FUNCTION"),
        ("model.py:make", "not a file"),
        ("models/mine.py", "not a file"),
        ("models/mine:make", "not a file"),
    ],
)
def test_a_target_is_a_module_and_a_function(text, said):
    with pytest.raises(UserError, match=said):
        parse_target(text)
    assert parse_target("package.model:make") == ("package.model", "make")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mak", "did you mean 'make'?"),
        ("NOT_A_FUNCTION", "is a int, not a function"),
        ("raises", "raised ValueError: no such file (tuned_models.py, line"),
        ("needs_an_argument", "raised TypeError"),
        ("two_of_them", "returned a tuple of 2; expected (module, batch, loss)"),
        ("not_a_module", "is a str, not a torch.nn.Module"),
        ("no_loss", "loss is None, not a function"),
        ("lazy", "head.weight, head.bias have no shape before a first forward pass"),
        ("all_frozen", "no parameter of the module requires a gradient"),
        ("loss_is_a_vector", "is a tensor of 8 × 3, not a scalar"),
        ("loss_is_a_number", "is a float, not a scalar tensor"),
        ("loss_has_no_graph", "depends on no parameter"),
        ("loss_raises", "loss(module, batch) raised TypeError"),
        ("sparse", "the gradient of weight is sparse"),
    ],
)
def test_a_broken_contract_is_one_line(name, said):
    assert said in refusal(f"tuned_models:{name}")


def test_a_module_that_cannot_be_imported_is_one_line(tmp_path):
    assert "no module 'nowhere'" in refusal("nowhere:make", tmp_path)
    assert "no module 'common.nowhere'" in refusal("common.nowhere:make", tmp_path)
    (tmp_path / "broken_model.py").write_text("x = 1\ny = (\n")
    assert "SyntaxError" in refusal("broken_model:make", tmp_path)
    assert "broken_model.py, line 2" in refusal("broken_model:make", tmp_path)
    (tmp_path / "needy_model.py").write_text("import missing_library_of_the_user\n")
    (tmp_path / "leaving_model.py").write_text("import sys\nsys.exit(0)\n")
    assert "SystemExit" in refusal("leaving_model:make", tmp_path)
    said = refusal("needy_model:make", tmp_path)
    assert "cannot be imported: ModuleNotFoundError" in said
    assert "missing_library_of_the_user" in said


def test_gradients_are_those_that_autograd_leaves(tmp_path):
    user = load_user_model("tuned_models:make", HERE, CPU)
    order = ready_order(user, CPU)
    user.loss(user.module, user.batch).backward()
    assert sorted(order) == sorted(
        n for n, p in user.module.named_parameters() if p.grad is not None
    )
    # the head comes first and the first layer last: the backward pass goes from the loss on
    assert set(order[:2]) == {"head.weight", "head.bias"}
    assert set(order[-2:]) == {"layers.0.weight", "layers.0.bias"}


def test_the_trained_part_computes_the_same_and_hides_what_is_frozen():
    module, batch, loss = tuned_models.make()
    module.eval()
    part = TrainedPart(module)
    assert torch.equal(loss(part, batch), loss(module, batch))
    names = [name for name, _ in part.named_parameters()]
    assert names == [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(list(part.parameters())) == 12


@pytest.mark.parametrize(
    "setting",
    [
        DEFAULT,
        DdpSetting(3.5),
        DdpSetting(0.5, first_mib=0.125, bucket_view=True),
        DdpSetting(1, compression="bf16"),
    ],
    ids=lambda setting: setting.label,
)
def test_the_lines_to_paste_are_what_was_measured(setting, monkeypatch):
    arguments = setting.ddp_arguments()
    inspect.signature(DistributedDataParallel).bind("a module", **arguments)
    made = mock.Mock()
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", made)
    names = {"model": "a module"}
    exec(setting.python(), names)
    made.assert_called_once_with("a module", **arguments)
    if setting.compression != "none":
        names["model"].register_comm_hook.assert_called_once_with(
            None, default_hooks.bf16_compress_hook
        )
    assert "local_rank" in setting.python(on_gpu=True)
    assert "local_rank" not in setting.python()


def test_a_module_is_followed_on_fake_tensors() -> None:
    module, *_ = tuned_models.make()
    architecture = followed_model("tuned_models:make", HERE)
    assert architecture.num_parameters == sum(p.numel() for p in module.parameters())
    assert architecture.forward_flops > 0
