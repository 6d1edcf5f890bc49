"""The explorer as a notebook shows it: two tabs."""

from __future__ import annotations

import os

import ipywidgets

from common.explore.batch_tab import BatchTab
from common.explore.bucket_tab import BucketTab
from common.explore.figures import Plotly
from common.explore.known_systems import known_systems
from common.explore.server import RUN_DIR_VARIABLE


def explorer(run_dir: str = "") -> ipywidgets.VBox:
    """Returns the tabs of buckets and of micro-batches.

    Args:
        run_dir: Run of assignment 2 to start from; by default the one that ``ddplab explore``
            was given, else the newest complete one, else the recorded one.
    """
    systems = known_systems(run_dir or os.environ.get(RUN_DIR_VARIABLE))
    tabs = ipywidgets.Tab(
        children=[BucketTab(systems).widget, BatchTab().widget],
        titles=["Buckets", "Micro-batches"],
    )
    tabs.add_class("ddplab-tabs")
    return ipywidgets.VBox([Plotly(), tabs])
