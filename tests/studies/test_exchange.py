"""The exchange of known duration: who overlaps over it, who reads too soon, and the study of it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from common.errors import UserError
from common.runtime.records.run_directory import read_environment
from common.studies.accuracy.tables import TABLES, case_rows
from common.studies.exchange.emulated_group import KERNEL, Exchange
from common.studies.exchange.exchange import CPU_MODELS, GPU_MODELS, ExchangeStudy
from common.studies.exchange.ranks import ExchangeJob, Wanted

WORKER = Path(__file__).parent / "exchange_worker.py"
STUDIES = Path(__file__).resolve().parents[2] / "common" / "studies" / "exchange"


@pytest.fixture(scope="module")
def found(rank_server) -> dict:
    done = rank_server.run(WORKER)
    assert done.exit_codes == [0], done.stderr
    return json.loads(done.stdout[0].splitlines()[-1])


@pytest.mark.slow
def test_a_bucket_is_under_way_while_the_next_becomes_ready(found):
    assert found["overlaps"]["over"]
    assert not any(found["overlaps"]["over"])


@pytest.mark.slow
def test_where_get_future_waits_every_bucket_is_over_before_the_next(found):
    assert found["stalls"]["over"]
    assert all(found["stalls"]["over"])


@pytest.mark.slow
def test_ddp_takes_sums_that_are_there_at_the_end_and_a_hasty_reader_does_not(found):
    assert found["overlaps"]["exact"]
    assert found["stalls"]["exact"]
    assert not found["hasty"]


@pytest.mark.slow
def test_a_group_that_nobody_has_connected_takes_no_time(found):
    assert found["unconnected"]


def test_gradients_of_every_strategy_are_exact_where_sums_arrive_late(rank_server, tmp_path):
    done = rank_server.run(STUDIES / "late.py", "--table", tmp_path / "late.csv")
    assert done.exit_codes == [0], done.stderr
    table = pd.read_csv(tmp_path / "late.csv")
    assert set(table["strategy"]) == {"DDP", "MY_DDP", "MY_BUCKETS", "MY_ZERO1", "MY_FSDP"}
    assert table["exact"].all()


@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernel_compiles_for_gpus_that_are_not_here(capability):
    """Compiles it by NVRTC, which needs no GPU."""
    try:
        torch.cuda._utils._get_nvrtc_library()
    except OSError:
        pytest.skip("this torch has no NVRTC")
    # What compiles for the GPU at hand otherwise asks the driver for its properties.
    compiled, name = torch.cuda._utils._nvrtc_compile(KERNEL, "exchange", capability)
    assert name == b"exchange" or name == "exchange"
    assert compiled


@pytest.fixture(scope="module")
def case(rank_server, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exchange")
    flags = ("--model", "gpt2-pico", "--batch_size", 1, "--max_seq_len", 16, "--steps", 1)
    flags += ("--exchanges", "1+200us", "--sizes", 3, "--probes", 1, "--judged", 2)
    flags += ("--max_buckets", 4, "--calibration_rounds", 2, "--rounds", 2, "--max_rounds", 2)
    flags += ("--output_dir", folder, "--run_id", "pico", "--device", "cpu")
    done = rank_server.run(STUDIES / "ranks.py", *flags)
    assert done.exit_codes == [0], done.stderr
    return folder / "pico-1+200us"


def test_bucketings_are_predicted_before_they_are_measured(case):
    predictions, caps = (pd.read_csv(case / name) for name in ("predictions.csv", "caps.csv"))
    assert len(predictions) >= 2
    assert predictions["written_s"].max() < caps["began_s"].min()
    rows = case_rows(case)
    assert set(rows) == set(TABLES)
    assert all(rows.values())


def test_a_run_names_its_exchange_so_that_none_is_compared_with_a_real_one(case):
    settings = yaml.safe_load((case / "config.yaml").read_text())
    assert settings["backend"] == "emulated"
    network = read_environment(case)["network"]
    assert network.startswith("emulated exchange, α 200 µs")


def test_an_exchange_takes_its_share_of_the_backward_pass():
    exchange = Wanted.named("0.5+300us").exchange(backward_s=0.1, gradient_bytes=10**8)
    assert exchange.time_s(10**8) == pytest.approx(0.05)
    assert exchange.time_s(0) == pytest.approx(300e-6)
    assert Wanted.named("1x8-stalls").exchange(0.1, 10**8) == Exchange(
        30e-6, 10**8 / (0.1 - 30e-6), blocks=8, stalls=True
    )


@pytest.mark.parametrize("name", ["", "0", "half", "0.5+us", "0.5+300ms", "0.5x", "0.5-stall"])
def test_an_exchange_that_is_none_is_refused(name):
    with pytest.raises(UserError, match="exchange"):
        Wanted.named(name)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="is less than the latency"):
        Wanted.named("0.5+300us").exchange(backward_s=5e-4, gradient_bytes=1000)
    with pytest.raises(UserError, match="each once"):
        ExchangeJob(exchanges=("1", "1"))
    with pytest.raises(UserError, match="unknown case 'gpt2-nano-7'"):
        ExchangeStudy(only=("gpt2-nano-7",))


def test_every_exchange_of_both_devices_is_legal():
    for model in (*CPU_MODELS, *GPU_MODELS):
        assert len({Wanted.named(name) for name in model.exchanges}) == len(model.exchanges)
