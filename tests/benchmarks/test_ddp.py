"""ddp_benchmark.py: real DDP steps over bucket caps, its tables, and what it refuses.

The fixture's run has caps 0.05, 0.5 and None (from BUCKET_SIZE), 2 rounds, 2 measured steps and 2
ranks.
"""

from __future__ import annotations

import pandas as pd
import pytest
import yaml
from rank_support import ASSIGNMENT2

from common.models.gpt2 import GPT2, GPT2Config
from common.perfmodel.buckets import DdpOptions, ddp_buckets

CAPS = {"0.05": 0.05, "0.5": 0.5, "None": None}
ROUNDS, STEPS, RANKS, WARMUP = 2, 2, 2, 3
KEYS = ["bucket_cap_mib", "round", "iteration", "rank"]


def read(run, name):
    """Reads a table with the caps as text: pandas takes the word None for a missing number."""
    return pd.read_csv(run / name, dtype={"bucket_cap_mib": str}, keep_default_na=False)


@pytest.fixture(scope="module")
def times(ddp_run):
    return read(ddp_run, "ddp-times.csv")


@pytest.fixture(scope="module")
def buckets(ddp_run):
    return read(ddp_run, "ddp-buckets.csv")


def of(table: pd.DataFrame, cap: str, rank: int) -> pd.DataFrame:
    return table[(table["bucket_cap_mib"] == cap) & (table["rank"] == rank)]


def visits(samples: pd.DataFrame) -> list[list[str]]:
    """Lists for each round the caps in the order in which their rows were written."""
    return [
        list(dict.fromkeys(rows["bucket_cap_mib"]))
        for _, rows in samples.groupby("round", sort=True)
    ]


def test_the_table_has_exactly_the_published_columns(ddp_run):
    header = (ddp_run / "ddp-times.csv").read_text().splitlines()[0]
    assert header == (
        "bucket_cap_mib,num_buckets,first_bucket_bytes,last_bucket_bytes,round,iteration,rank,"
        "forward_time_ms,backward_time_ms,step_time_ms,bucket_bytes"
    )


def test_there_is_one_row_for_each_cap_round_iteration_and_rank(times):
    expected = pd.MultiIndex.from_product(
        [CAPS, range(ROUNDS), range(STEPS), range(RANKS)], names=KEYS
    )
    assert sorted(times[KEYS].itertuples(index=False, name=None)) == sorted(expected)


def test_a_step_takes_at_least_its_forward_and_backward_pass(times):
    parts = times["forward_time_ms"] + times["backward_time_ms"]
    assert (times[["forward_time_ms", "backward_time_ms"]] > 0).all().all()
    assert (times["step_time_ms"] >= parts).all()


def test_warm_up_steps_are_in_a_file_of_their_own_and_nowhere_else(ddp_run, times):
    warmup = read(ddp_run, "ddp-warmup-times.csv")
    assert list(warmup.columns) == list(times.columns)
    assert sorted(warmup["iteration"].unique()) == [-3, -2, -1]
    assert len(warmup) == len(CAPS) * ROUNDS * WARMUP * RANKS
    assert times["iteration"].min() == 0


def test_every_round_visits_every_cap_once_and_not_always_in_the_same_order(times):
    orders = visits(times)
    assert all(sorted(order) == sorted(CAPS) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert len({order[0] for order in orders}) > 1  # no cap is always the first


def test_every_round_also_times_the_step_without_ddp(ddp_run):
    local = pd.read_csv(ddp_run / "local-times.csv")
    seen = sorted(local[["round", "iteration", "rank"]].itertuples(index=False, name=None))
    product = pd.MultiIndex.from_product([range(ROUNDS), range(STEPS), range(RANKS)])
    assert seen == sorted(product)


@pytest.mark.parametrize("cap", CAPS)
def test_number_and_sizes_are_those_of_the_bucket_table(times, buckets, cap):
    for rank in range(RANKS):
        own = of(buckets, cap, rank)
        assert list(own["bucket"]) == list(range(len(own)))
        rows = of(times, cap, rank)
        sizes = list(own["size_bytes"])
        described = rows[["num_buckets", "first_bucket_bytes", "last_bucket_bytes"]]
        assert set(described.itertuples(index=False, name=None)) == {
            (len(sizes), sizes[0], sizes[-1])
        }
        assert set(rows["bucket_bytes"].astype(str)) == {" ".join(map(str, sizes))}


@pytest.mark.parametrize("cap", CAPS)
def test_the_performance_model_forms_the_buckets_that_ddp_really_made(buckets, train_run, cap):
    """The order is measured in another run, without DDP; the buckets are DDP's own record."""
    model = GPT2(GPT2Config.named("gpt2-pico"))
    names = [name for name, _ in model.named_parameters()]
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    ready = pd.read_csv(train_run / "gradient-ready-times.csv").query(
        "rank == 0 and iteration == 0"
    )
    order = [names.index(name) for name in ready.sort_values("ready_time_ms")["parameter"]]
    expected = ddp_buckets(sizes, order, DdpOptions(bucket_cap_mib=CAPS[cap]))
    for rank in range(RANKS):
        own = of(buckets, cap, rank)
        assert list(own["size_bytes"]) == [sum(sizes[i] for i in b) for b in expected]
        members = [" ".join(names[i] for i in bucket) for bucket in expected]
        assert list(own["parameters"]) == members


def test_a_smaller_cap_makes_more_buckets_and_the_default_starts_with_a_small_one(times):
    rows = times.drop_duplicates("bucket_cap_mib").set_index("bucket_cap_mib")
    assert rows.loc["0.05", "num_buckets"] > rows.loc["0.5", "num_buckets"] > 1
    assert 2**20 <= rows.loc["None", "first_bucket_bytes"] < 1.5 * 2**20  # limits 1, then 25 MiB
    assert (rows["last_bucket_bytes"] >= 256 * 128 * 4).all()  # the tied embedding's


def test_ddps_own_record_of_communication_is_kept_for_every_measured_step_but_the_last(ddp_run):
    overlap = read(ddp_run, "ddp-overlap-times.csv")
    assert list(overlap.columns) == [
        *("bucket_cap_mib", "round", "iteration", "rank"),
        *("backward_compute_time_ms", "communication_time_ms", "overlap_time_ms"),
    ]
    expected = pd.MultiIndex.from_product([CAPS, range(ROUNDS), range(STEPS - 1), range(RANKS)])
    assert sorted(overlap[KEYS].itertuples(index=False, name=None)) == sorted(expected)
    assert (overlap["backward_compute_time_ms"] > 0).all()
    assert (overlap["communication_time_ms"] > 0).all()
    assert (overlap["overlap_time_ms"] <= overlap["communication_time_ms"]).all()


def test_the_runs_settings_and_its_caps_are_recorded(ddp_run):
    config = yaml.safe_load((ddp_run / "config.yaml").read_text())
    assert config["bucket_cap_mb"] == [*CAPS]
    settings = (config["model"], config["rounds"], config["static_graph"])
    assert settings == ("gpt2-pico", ROUNDS, False)
    assert not list(ddp_run.glob("*.partial"))


TINY = ["--model", "nano", "--batch_size", 1, "--max_seq_len", 16, "--rounds", 1, "--num_steps", 1]


@pytest.mark.two_ranks
def test_a_run_directory_that_is_there_is_refused_once_for_all_ranks(rank_server, tmp_path):
    (tmp_path / "run").mkdir()
    flags = [*TINY, "--device", "cpu", "--output_dir", tmp_path, "--run_id", "run"]
    done = rank_server.run(ASSIGNMENT2 / "ddp_benchmark.py", *flags, ranks=2)
    assert done.exit_codes == [2, 2], done.stderr
    assert str(tmp_path) in done.error_line
    assert not list((tmp_path / "run").iterdir())
