"""The accuracy study: one small case on two real ranks, and where its other cases are placed."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest

from common.cluster.emulated import EmulatedCluster, why_no_hosts
from common.cluster.launch import launch
from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.calibration import read_calibration
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.tables import read_ready_times
from common.runtime.records.run_directory import RunDirectory
from common.runtime.stage_progress import StageProgress
from common.studies.accuracy.accuracy import RANKS, AccuracyStudy, run_study
from common.studies.accuracy.networks import FASTEST_MBIT, REGIMES, Network, parse_network
from common.studies.accuracy.tables import TABLES, case_rows

FEW = {"model": "mlp", "batch_size": 2, "judged": 2, "steps": 1, "sizes": 3, "probes": 1}
SMALL = [f"--{name}={value}" for name, value in FEW.items()]


@pytest.fixture(scope="module")
def case(rank_server, tmp_path_factory) -> Path:
    """Runs a case: an MLP on two ranks over loopback, two bucketings and DDP's default."""
    folder = tmp_path_factory.mktemp("accuracy")
    flags = ("--calibration_rounds", 2, "--rounds", 2, "--max_rounds", 2)
    flags += ("--output_dir", folder, "--run_id", "case")
    done = rank_server.run(RANKS, *SMALL, *flags, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return folder / "case-loopback"


@pytest.mark.slow
@pytest.mark.xdist_group("accuracy_case")
@pytest.mark.two_ranks
def test_bucketings_differ_and_are_those_that_ddp_made(case):
    caps = pd.read_csv(case / "caps.csv").drop_duplicates("bucket_cap_mib")
    assert len(caps) == 3
    assert caps["bucket_cap_mib"].isna().sum() == 1  # DDP's default
    profile = read_ready_times(case / "gradient-ready-times.csv")
    for cap in caps.itertuples():
        chosen = None if pd.isna(cap.bucket_cap_mib) else cap.bucket_cap_mib
        buckets = profile_buckets(profile, DdpOptions(chosen))
        sizes = [int(profile.sizes_bytes[list(bucket)].sum()) for bucket in buckets]
        found = (cap.num_buckets, cap.first_bucket_bytes, cap.last_bucket_bytes)
        assert found == (len(sizes), sizes[0], sizes[-1])


@pytest.mark.slow
@pytest.mark.xdist_group("accuracy_case")
@pytest.mark.two_ranks
def test_every_table_of_the_study_gets_rows_of_the_case(case):
    rows = case_rows(case)
    assert set(rows) == set(TABLES)
    for name, columns in TABLES.items():
        assert rows[name]
        assert all(tuple(row) == columns for row in rows[name])
    roles = pd.DataFrame(rows["steps.csv"])["role"]
    # Two rounds of one step each: without DDP and DDP's forward pass, then again without DDP, two
    # bucketings and the default.
    counts = {"local": 2, "forward": 2, "witness": 2, "judged": 6}
    assert roles.value_counts().to_dict() == counts
    (facts,) = rows["cases.csv"]
    assert (facts["model"], facts["hosts"], facts["regime"]) == ("mlp", 2, "loopback")
    gradients = pd.DataFrame(rows["gradients.csv"])
    assert gradients["size_bytes"].sum() == facts["gradient_bytes"]
    assert 0 < gradients["ready_time_ms"].max() < 1e3


@pytest.mark.slow
@pytest.mark.xdist_group("accuracy_case")
@pytest.mark.two_ranks
def test_predictions_are_those_of_the_shipped_calibration_and_come_first(case):
    predictions = pd.read_csv(case / "predictions.csv")
    caps = pd.read_csv(case / "caps.csv")
    assert predictions["written_s"].max() < caps["began_s"].min()
    # As ``ddplab predict`` would from the same tables.
    calibration = read_calibration(
        case / "gradient-ready-times.csv",
        case / "allreduce-samples.csv",
        case / "overlap-times.csv",
        backend="gloo",
    )
    for row in predictions.itertuples():
        cap = None if pd.isna(row.bucket_cap_mib) else row.bucket_cap_mib
        assert row.predicted_ms == pytest.approx(1e3 * calibration.model().backward_s(cap))
        assert row.low_ms <= row.high_ms


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> Path:
    """Visits two networks of one model by the same two emulated hosts."""
    if reason := why_no_hosts():
        pytest.skip(f"no emulated hosts: {reason}")
    folder = tmp_path_factory.mktemp("emulated")
    flags = [*SMALL, "--networks", "communication-bound", "compute-bound+2ms"]
    flags += [
        "--calibration_rounds=1",
        "--rounds=1",
        "--max_rounds=1",
        f"--output_dir={folder}",
        "--run_id=mlp",
    ]
    hosts = EmulatedCluster.of(2, ["1gbit"])
    launch(RANKS, flags, 2, folder / "log", hosts=hosts)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("emulated")
@pytest.mark.two_ranks
def test_hosts_set_the_rates_of_their_own_links(emulated):
    slow, fast = (
        case_rows(emulated / f"mlp-{name}") for name in ("communication-bound", "compute-bound+2ms")
    )
    (slow_facts,), (fast_facts,) = slow["cases.csv"], fast["cases.csv"]
    assert slow_facts["added_latency_ms"] == 0
    assert fast_facts["added_latency_ms"] == 2
    share = REGIMES["communication-bound"] / REGIMES["compute-bound"]
    rates = [facts["rate_mbit_per_s"] for facts in (slow_facts, fast_facts)]
    assert rates[1] == pytest.approx(min(FASTEST_MBIT, share * rates[0]), rel=0.1)
    # A link does not carry more than it is set to: a ring of two sends each byte once.
    samples = pd.DataFrame(slow["all-reduces.csv"])
    largest = samples[samples["total_bytes"] == samples["total_bytes"].max()]
    bits = largest["total_bytes"].iloc[0] * 8
    assert largest["time_ms"].min() / 1e3 > 0.95 * bits / (rates[0] * 1e6)


def test_rates_give_each_regime_its_share_of_communication():
    for ranks, sent in ((2, 1.0), (4, 1.5)):  # of all bytes, over each link of a ring
        for regime, share in REGIMES.items():
            rate = Network(regime).rate_mbit(0.1, 10**7, ranks)
            seconds = sent * 10**7 * 8 / (rate * 1e6 * 0.94)
            assert seconds == pytest.approx(share * 0.1, rel=0.05)
    assert Network("loopback").rate_mbit(0.1, 10**7, 2) == 0
    assert Network("balanced").rate_mbit(1e-6, 10**7, 2) == FASTEST_MBIT


@pytest.mark.parametrize("name", ["balanced", "loopback", "compute-bound+4ms", "balanced+0.5ms"])
def test_a_network_is_read_from_its_name(name):
    assert parse_network(name).name == name


@pytest.mark.parametrize("name", ["fast", "balanced+ms", "balanced+4s", ""])
def test_a_network_that_is_none_is_refused(name):
    with pytest.raises(UserError, match="there are loopback, communication-bound"):
        parse_network(name)


def test_every_model_is_seen_in_every_regime():
    jobs = AccuracyStudy().jobs()
    names = [f"{job.name}-{network}" for job in jobs for network in job.networks]
    assert len(set(names)) == len(names)
    for model in ("gpt2-nano", "mlp", "bert", "convnext"):
        for regime in REGIMES:
            assert any(j.model == model and regime in j.networks for j in jobs)
    assert sum(job.networks == ("loopback",) for job in jobs) >= 3
    assert jobs[0].model == "replay"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": ("bert",)}, "each is a name and a batch"),
        ({"regimes": ("fast",)}, "network 'fast': there are loopback, communication-bound"),
        ({"models": ("bert:4", "bert:8")}, "models .*: each once"),
        ({"with_latency": ("vgg",)}, "model 'vgg' is not among"),
        ({"replays": ("4:fast",)}, "network 'fast': there are loopback"),
        ({"minutes_per_case": 0}, "minutes_per_case is 0"),
        ({"replays": ("four:balanced",)}, "hosts and regime, 4:balanced"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        AccuracyStudy(**settings)


ONE_CASE = {
    "models": ("mlp:2",),
    "regimes": (),
    "over_loopback": ("mlp",),
    "with_latency": (),
    "replays": (),
}


@pytest.fixture
def cut_study(case, tmp_path) -> Path:
    """Makes a study of one job that was cut after it: its tables have not got their names."""
    folder = tmp_path / "mlp-loopback"
    shutil.copytree(case, folder)
    cut = RunDirectory.create(tmp_path, "accuracy", asdict(AccuracyStudy(**ONE_CASE)), {}, "cut")
    for name, rows in case_rows(folder).items():
        pd.DataFrame(rows).to_csv(cut.path / f"{name}.partial", index=False)
    return cut.path


@pytest.mark.slow
@pytest.mark.xdist_group("accuracy_case")
@pytest.mark.two_ranks
@pytest.mark.skipif(why_no_hosts() is not None, reason="no emulated hosts")
def test_a_study_that_was_cut_goes_on_from_its_complete_cases(cut_study, tmp_path):
    study = AccuracyStudy(**ONE_CASE, minutes_per_case=9, continues=str(cut_study))
    done = run_study(study, str(tmp_path), StageProgress())
    for name in TABLES:
        before = pd.read_csv(cut_study / f"{name}.partial")
        pd.testing.assert_frame_equal(pd.read_csv(done / name), before)
    assert list((done / "runs").iterdir()) == []  # nothing was measured again


@pytest.mark.slow
@pytest.mark.xdist_group("accuracy_case")
@pytest.mark.two_ranks
@pytest.mark.skipif(why_no_hosts() is not None, reason="no emulated hosts")
def test_only_the_same_study_is_continued(cut_study, tmp_path):
    listed, other = tmp_path / "listed", tmp_path / "other"
    shutil.copytree(cut_study, listed)
    (listed / "config.yaml").write_text("- 1\n")
    shutil.copytree(cut_study, other)
    (other / "cases.csv.partial").write_text("model\nmlp\n")
    for settings, message in [
        ({"continues": str(cut_study), "rounds": 9}, "its rounds was 8, now it is 9"),
        ({"continues": str(tmp_path / "none")}, "not an accuracy study"),
        ({"continues": str(listed)}, "its config.yaml has no settings"),
        ({"continues": str(other)}, "its cases.csv has no column added_latency_ms"),
    ]:
        with pytest.raises(UserError, match=message):
            run_study(AccuracyStudy(**(ONE_CASE | settings)), str(tmp_path), StageProgress())
