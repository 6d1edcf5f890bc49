"""The explorer as a notebook shows it: four tabs."""

from __future__ import annotations

import os

import ipywidgets

from common.explore.batch_tab import BatchTab
from common.explore.bucket_tab import BucketTab
from common.explore.chosen_model import DEFAULT_MODEL, given_model, named_model
from common.explore.clusters.cluster_tab import ClusterTab
from common.explore.clusters.plan_tab import PlanTab
from common.explore.figures import Plotly
from common.explore.known_systems import known_systems
from common.explore.server import RUN_DIR_VARIABLE, TRACES_VARIABLE


def explorer(run_dir: str = "", model: str = "") -> ipywidgets.VBox:
    """Returns the tabs of buckets, of micro-batches, of a model on a cluster, and of its plans.

    Args:
        run_dir: Run of assignment 2 to start from; by default the one that ``ddplab explore``
            was given, else the newest complete one, else the recorded one.
        model: Published size or ``config.json`` to put on clusters; by default the model that
            ``ddplab explore`` was given, else gpt2-large.
    """
    chosen = given_model(model)
    computed = chosen or named_model(DEFAULT_MODEL)
    given_run, traces = map(os.environ.get, (RUN_DIR_VARIABLE, TRACES_VARIABLE))
    systems = known_systems(run_dir or given_run, computed, traces)
    plans = PlanTab(chosen)
    first = [BucketTab(systems).widget, BatchTab().widget, ClusterTab(chosen).widget]
    tabs = ipywidgets.Tab(
        children=[*first, plans.widget],
        titles=["Buckets", "Micro-batches", "Clusters", "Plans"],
        selected_index=2 if chosen else 0,
    )

    def opened(change: dict) -> None:
        if change["new"] == len(first):  # a search takes seconds, which no other tab waits for
            plans.update()

    tabs.observe(opened, "selected_index")
    tabs.add_class("ddplab-tabs")
    return ipywidgets.VBox([Plotly(), tabs])
