"""Sweeps whose gradients were views of DDP's buckets: nothing is copied back in their prediction.

A recorded run is copied, and what its settings say is changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.networks import measured_networks
from common.errors import UserError
from common.runtime.paths import project_root

RECORDED = project_root() / "data" / "epyc-2-cores" / "assignment2"
VIEW = "gradient_as_bucket_view"


def copied(folder: Path, view: bool | None) -> Path:
    """Copies the recorded run; its sweeps say ``view``, or nothing."""
    shutil.copytree(RECORDED, folder)
    for path in folder.glob("**/ddp_benchmark/config.yaml"):
        settings = yaml.safe_load(path.read_text())
        assert settings.pop(VIEW) is False
        said = {} if view is None else {VIEW: view}
        path.write_text(yaml.safe_dump(settings | said))
    return folder


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    return open_run(copied(tmp_path_factory.mktemp("copied") / "views", True))


def test_without_the_setting_a_run_is_predicted_as_without_views(tmp_path):
    silent = open_run(copied(tmp_path / "silent", None))
    assert silent.model.costs == open_run(RECORDED).model.costs
    assert silent.model.costs.copy_out_s_per_byte > 0


def test_with_views_no_network_of_the_run_copies_anything_back(views):
    runs = measured_networks(views)
    assert len(runs) == 3
    for run, plain in zip(runs, measured_networks(open_run(RECORDED)), strict=True):
        assert run.model.costs.copy_out_s_per_byte == 0
        assert run.model.costs.copy_in_s_per_byte == plain.model.costs.copy_in_s_per_byte > 0
        # The last bucket's way back is at the end of every pass: at a cap of 64 MiB it is all.
        saved_s = plain.model.backward_s(64) - run.model.backward_s(64)
        copied_s = plain.model.costs.copy_out_s_per_byte * plain.model.profile.total_bytes
        assert saved_s == pytest.approx(copied_s)


def test_bands_and_predictions_are_of_the_same_model(views):
    drawn = views.calibration.drawn(np.random.default_rng(0))
    assert views.calibration.model().backward_s(4) == pytest.approx(views.model.backward_s(4))
    assert drawn.costs.copy_out_s_per_byte == 0


def test_sweeps_with_and_without_views_are_not_compared(tmp_path):
    folder = copied(tmp_path / "both", True)
    other = folder / "local"
    shutil.copytree(folder / "ddp_benchmark", other)
    config = other / "config.yaml"
    config.write_text(config.read_text().replace(f"{VIEW}: true", f"{VIEW}: false"))
    for name in ("ddp-times.csv", "ddp-overlap-times.csv"):
        (other / name).unlink()
    (folder / "ddp_benchmark" / "local-times.csv").unlink()
    with pytest.raises(UserError, match=VIEW):
        open_run(folder)
