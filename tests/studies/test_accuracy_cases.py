"""The accuracy study: one small case on two real ranks, and where its other cases are placed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.simulator import profile_buckets
from common.perfmodel.tables import read_ready_times
from common.studies.accuracy import REGIMES, AccuracyStudy, Case, computation, emulated_cases
from common.studies.accuracy_tables import TABLES, case_rows

RANKS_SCRIPT = Path(__file__).resolve().parents[2] / "common" / "studies" / "accuracy_ranks.py"
SMALL = ("--model", "mlp", "--batch_size", 2, "--judged", 2, "--steps", 1, "--sizes", 3)


@pytest.fixture(scope="module")
def case(rank_server, tmp_path_factory) -> Path:
    """A finished case: an MLP on two ranks, two judged bucketings and one that calibrates."""
    folder = tmp_path_factory.mktemp("accuracy")
    flags = ("--rounds", 2, "--max_rounds", 2, "--output_dir", folder, "--run_id", "case")
    done = rank_server.run(RANKS_SCRIPT, *SMALL, *flags, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return folder / "case"


@pytest.mark.two_ranks
def test_bucketings_differ_and_are_those_that_ddp_made(case):
    caps = pd.read_csv(case / "caps.csv").drop_duplicates("bucket_cap_mib")
    assert sorted(caps["role"]) == ["calibration", "judged", "judged"]
    assert caps["num_buckets"].is_unique
    profile = read_ready_times(case / "gradient-ready-times.csv")
    for cap in caps.itertuples():
        buckets = profile_buckets(profile, DdpOptions(cap.bucket_cap_mib))
        sizes = [int(profile.sizes_bytes[list(bucket)].sum()) for bucket in buckets]
        found = (cap.num_buckets, cap.first_bucket_bytes, cap.last_bucket_bytes)
        assert found == (len(sizes), sizes[0], sizes[-1])


@pytest.mark.two_ranks
def test_every_table_of_the_study_gets_rows_of_the_case(case):
    rows = case_rows(Case("mlp", 2), case)
    assert set(rows) == set(TABLES)
    for name, columns in TABLES.items():
        assert rows[name]
        assert all(tuple(row) == columns for row in rows[name])
    roles = pd.DataFrame(rows["steps.csv"])["role"]
    # Two rounds of one step: without DDP, the calibration's bucketing and two judged ones.
    assert roles.value_counts().to_dict() == {"judged": 4, "calibration": 2, "local": 2}
    backward_s, gradient_bytes = computation(case)
    gradients = pd.DataFrame(rows["gradients.csv"])
    assert gradients["size_bytes"].sum() == gradient_bytes
    assert 0 < gradients["ready_time_ms"].max() < 1e3
    assert 0 < backward_s < 1


def test_rates_give_each_regime_its_share_of_communication():
    study = AccuracyStudy(models=("bert:4",), on_four_hosts=("bert",), with_latency=(), replays=())
    cases = {
        (case.regime, case.hosts): case for case in emulated_cases(study, {"bert": (0.1, 10**7)})
    }
    for regime, share in REGIMES.items():
        # A ring of two sends as much as there is through each link.
        seconds = 10**7 * 8 / (cases[regime, 2].rate_mbit * 1e6 * 0.94)
        assert seconds == pytest.approx(share * 0.1, rel=0.05)
    # Four ranks on two cores compute half as fast, and send half as much again.
    assert np.isclose(
        cases["balanced", 4].rate_mbit, cases["balanced", 2].rate_mbit * 0.75, rtol=0.05
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": ("bert",)}, "each is a name and a batch"),
        ({"regimes": ("fast",)}, "regime 'fast'; there are communication-bound"),
        ({"models": ("bert:4", "bert:8")}, "models .*: each once"),
        ({"with_latency": ("vgg",)}, "model 'vgg' is not among"),
        ({"replays": ("4:fast",)}, "regime 'fast'; there are communication-bound"),
        ({"replays": ("four:balanced",)}, "hosts and regime, 4:balanced"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        AccuracyStudy(**settings)
