"""The trainer on one device against loops written by hand, and what it says while it trains."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from common.data.shard_files import ShardWriter
from common.data.tokenization import encode, load_vocabulary, text_pieces
from common.models.gpt2 import GPT2, GPT2Config
from common.runtime.seeding import seed_everything
from common.training.config import BaselineConfig
from common.training.recording.step_log import STEP_COLUMNS
from common.training.trainer import learning_rate, train

SHARED = Path(__file__).resolve().parents[3] / "shared"
VOCABULARY = SHARED / "vocab" / "gpt2"
SHAKESPEARE = SHARED / "datasets" / "text" / "tinyshakespeare.txt"
GPT2_TOKENS = 50257
HEADER_BYTES = 1024
SMALL = {
    "model": "gpt2-pico",
    "global_batch_size": 8,
    "micro_batch_size": 8,
    "seq_len": 16,
    "num_steps": 10,
    "lr": 3e-3,
    "log_every": 100,
    "profile": False,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Makes the folder of the runs; synthetic text is made in it once."""
    return tmp_path_factory.mktemp("curves")


@pytest.fixture(scope="module")
def shakespeare(tmp_path_factory) -> Path:
    """Writes two shards of real text in GPT-2's tokens."""
    for path in (VOCABULARY, SHAKESPEARE):
        if not path.exists():
            pytest.skip(f"not here: ../shared/{path.relative_to(SHARED)}")
    folder = tmp_path_factory.mktemp("shakespeare")
    with ShardWriter(folder, shard_tokens=1000) as writer:
        pieces = text_pieces(SHAKESPEARE)
        for tokens in encode(pieces, load_vocabulary(str(VOCABULARY)), max_tokens=2000):
            writer.append(tokens)
    return folder


def run(folder: Path, name: str, **settings: object) -> pd.DataFrame:
    """Trains, and reads what was written of each step."""
    train(BaselineConfig(**SMALL | settings, output_dir=str(folder), run_id=name))
    return pd.read_csv(folder / name / "training-steps.csv")


# --- Real text, beside transformers' model in a plain loop -----------------------------------


REAL = {
    **{"model": "gpt2-pico", "vocab_size": GPT2_TOKENS, "global_batch_size": 4, "seq_len": 16},
    **{"micro_batch_size": 2, "num_steps": 20, "lr": 3e-3, "min_lr": 3e-4},
}


def by_hand(data: Path, steps: int = 20, batch: int = 4, length: int = 16) -> list[float]:
    """Trains transformers' GPT-2 from our first weights in the plainest loop; returns losses."""
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    seed_everything(BaselineConfig().seed)
    ours = GPT2(GPT2Config.named("gpt2-pico", vocab_size=GPT2_TOKENS))
    sizes = {name: getattr(ours.config, name) for name in ("n_embd", "n_layer", "n_head")}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(
        TheirConfig(vocab_size=GPT2_TOKENS, n_positions=256, **sizes, **no_dropout, use_cache=False)
    )
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in model.transformer.named_parameters():
            weight = weights[name.replace("h.", "blocks.")]
            # Their linear layers are Conv1D, [in, out].
            transposed = ".c_" in name and name.endswith("weight")
            parameter.copy_(weight.T if transposed else weight)

    tokens = np.concatenate(
        [np.fromfile(path, "<u2", offset=HEADER_BYTES) for path in sorted(data.glob("*.bin"))]
    ).astype(np.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1)
    losses = []
    for step in range(steps):
        start = step * batch * length
        inputs = tokens[start : start + batch * length].reshape(batch, length)
        targets = tokens[start + 1 : start + batch * length + 1]
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = 3e-4 + (3e-3 - 3e-4) * cosine
        logits = model(torch.from_numpy(inputs)).logits
        loss = F.cross_entropy(logits.view(-1, GPT2_TOKENS), torch.from_numpy(targets))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow  # in kind: tests/models/test_gpt2.py, which has the losses of transformers
def test_on_real_text_the_losses_are_those_of_transformers_in_a_plain_loop(shakespeare, folder):
    found = run(folder, "real", **REAL, data=str(shakespeare))["loss"].tolist()
    expected = by_hand(shakespeare)
    assert found == pytest.approx(expected, abs=1e-3)
    assert found[0] == pytest.approx(math.log(GPT2_TOKENS), rel=0.02)
    assert found[-1] < found[0] - 1


# --- What is printed and written -------------------------------------------------------------


@pytest.fixture(scope="module")
def default_run(folder) -> tuple[list[str], Path]:
    """Runs 20 steps with default schedule, log and profile; returns what it prints, its folder."""
    defaults = {name: getattr(BaselineConfig(), name) for name in ("log_every", "lr", "profile")}
    capture = pytest.MonkeyPatch()
    lines: list[str] = []
    with capture.context() as patch:
        patch.setattr("builtins.print", lambda line, **_: lines.append(line))
        run(folder, "default", **defaults, num_steps=20, measure_memory=True)
    return lines, folder / "default"


def test_the_lines_are_those_that_the_course_prints(default_run):
    lines, path = default_run
    step = r"step={} \| loss=\d+\.\d{{4}} \| lr={} \| time=\d+(\.\d+)?s"
    expected = [
        r"Tokens in shard: 4,000,000",
        step.format(0, r"2\.98e-04"),  # as the course's log of 20 steps from 3e-4
        step.format(10, r"1\.27e-04"),
        r"Training completed in \d+\.\ds",
        r"Baseline training completed!",
        r"Traces saved to: .*/traces/baseline/",
    ]
    for line, pattern in zip(lines, expected, strict=False):
        assert re.fullmatch(pattern, line), line
    assert list((path / "traces" / "baseline").iterdir())


def test_every_step_has_a_row_with_time_throughput_and_memory(default_run):
    table = pd.read_csv(default_run[1] / "training-steps.csv")
    assert tuple(table.columns) == STEP_COLUMNS
    assert table["step"].tolist() == list(range(20))
    assert (table["rank"] == 0).all()
    tokens = SMALL["global_batch_size"] * SMALL["seq_len"]
    found = table["throughput_tokens_per_s"] * table["step_time_ms"] / 1e3
    np.testing.assert_allclose(found, tokens, rtol=1e-9)
    # Profiled are the six steps after two of waiting and two of warm-up, and the warm-up.
    assert table["profiled"].sum() >= 6
    assert not table["profiled"].iloc[-5:].any()
    memory = pd.read_csv(default_run[1] / "memory.csv")
    # At least weights, gradients and AdamW's two states in float32.
    parameters = GPT2Config.named("gpt2-pico").num_parameters()
    assert memory["peak_bytes"].tolist()[0] > 4 * 4 * parameters


# --- Learning rate ---------------------------------------------------------------------------


def scheduled(steps: int, lr: float, min_lr: float, warmup: int) -> list[float]:
    """Computes the learning rate of every step, by torch's schedulers."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=min_lr)
    schedule = cosine
    if warmup:
        # The rise begins one part above zero, and would reach lr in the cosine's first step.
        rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        schedule = SequentialLR(optimizer, [rise, cosine], milestones=[warmup])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("steps", "lr", "min_lr", "warmup"),
    [
        (20, 3e-4, 0.0, 0),
        (20, 3e-4, 3e-5, 0),
        (50, 6e-4, 6e-5, 10),
        (7, 1e-3, 0.0, 6),
        (1, 1, 0, 0),
    ],
)
def test_the_learning_rate_is_that_of_torchs_schedulers(steps, lr, min_lr, warmup):
    config = BaselineConfig(num_steps=steps, lr=lr, min_lr=min_lr, warmup_steps=warmup)
    found = [learning_rate(step, config) for step in range(steps)]
    assert found == pytest.approx(scheduled(steps, lr, min_lr, warmup), rel=1e-9)


def test_the_optimizer_gets_the_scheduled_rate(folder):
    settings = {"num_steps": 8, "warmup_steps": 3, "min_lr": 1e-4, "lr": 3e-3}
    table = run(folder, "schedule", **settings)
    assert table["learning_rate"].tolist() == pytest.approx(scheduled(8, 3e-3, 1e-4, 3), rel=1e-9)


# --- Options that do not change what is computed ---------------------------------------------


@pytest.fixture(scope="module")
def exact(folder) -> pd.DataFrame:
    """Trains ten steps in float64, a step's sequences all at once."""
    return run(folder, "exact", precision="float64")


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 4, "activation_checkpointing": True, "loss_chunks": 2},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_options_that_save_memory_leave_losses_and_norms_alone(exact, folder, options, request):
    name = re.sub(r"\W+", "-", request.node.name)
    found = run(folder, name, precision="float64", **options)
    for what in ("loss", "gradient_norm"):
        np.testing.assert_allclose(found[what], exact[what], rtol=0, atol=1e-10)


def test_bfloat16_trains_as_float32_does(exact, folder):
    full = run(folder, "float32")["loss"].to_numpy()
    half = run(folder, "bfloat16", precision="bfloat16")["loss"].to_numpy()
    np.testing.assert_allclose(half, full, rtol=0.02)
    assert half[-1] < half[0]
    assert (half != full).any()
    # Float32 beside float64 shows how much nearer rounding alone keeps them.
    np.testing.assert_allclose(full, exact["loss"], rtol=1e-5)
