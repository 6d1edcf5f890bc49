"""The tab of clusters: any model, shared out over more and more GPUs, and whether it fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

from common.analysis.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from common.explore.chosen_model import ChosenModel, named_model, offered_names
from common.explore.clusters.cluster_job import (
    MEMORY_PARTS,
    STEP_PARTS,
    JobSettings,
    JobView,
    job_line,
    memory_part,
    numbers_of_gpus,
    offer_gpus,
    view_job,
)
from common.explore.controls import Key, Slider, Tab, Text, choice, on_change, time_text
from common.explore.figures import Figure, bar, clear, figure, line, points
from common.perfmodel.cluster.clusters import known_clusters, load_cluster
from common.perfmodel.cluster.job import RECOMPUTED
from common.perfmodel.cluster.scale_out import OTHERS, STRATEGIES
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES
from common.perfmodel.one_device.workload import CHOICES
from common.runtime.wording import counted, digits

CLUSTER, STRATEGY, GPUS = "h100-ib", "FULL_SHARD", 64
"""The cluster, the strategy and the number of GPUs that the tab starts with."""
POWERS = [2**power for power in range(9)]
STEP_COLOURS = dict(zip(STEP_PARTS, (BLUE, ORANGE, PURPLE, SKY, RED), strict=True))
MEMORY_COLOURS = dict(zip(MEMORY_PARTS, (BLUE, SKY, GREEN, RED, ORANGE), strict=True))
GB = 1e9
SMALLEST_SHARE = 0.1
"""Share of a GPU's memory from which on the whole of it is drawn beside."""


class ClusterTab(Tab):
    """The widgets of the tab, and the steps that they show."""

    def __init__(self, chosen: ChosenModel | None = None) -> None:
        self.chosen = chosen
        self._stepped: tuple[JobSettings, str, JobView] | None = None
        self.model = choice("Model", offered_names(chosen))
        self.choices = {
            "cluster": choice("Cluster", known_clusters(), CLUSTER),
            "strategy": choice("Strategy", [*STRATEGIES, *OTHERS], STRATEGY),
            "checkpointing": choice("Computed again", list(RECOMPUTED)),
            "precision": choice("Precision", list(CHOICES["precision"]), "bfloat16"),
        }
        self.sliders: dict[str, Slider] = {
            "gpus": Slider("GPUs", numbers_of_gpus(load_cluster(CLUSTER)), GPUS, "{:,}".format),
            "batch_size": Slider("samples of a micro-batch", POWERS, 1),
            "accumulation": Slider("micro-batches of a step", POWERS, 1),
        }
        headings = {
            "step": _heading(STEP_COLOURS, efficiency=Key(BLACK, "line")),
            "memory": _heading(MEMORY_COLOURS, room=Key(BLACK, "dashes")),
        }
        super().__init__(headings, {"step": step_figure(), "memory": memory_figure()})
        controls = [self.model, *self.choices.values(), *self.sliders.values()]
        self.widget = self.page(controls)
        on_change([self.choices["cluster"]], self._offer_gpus)
        on_change(controls, self.update)
        self.update()

    def settings(self) -> JobSettings:
        """Returns what the controls say."""
        values = {name: control.value for name, control in (self.choices | self.sliders).items()}
        return JobSettings(**values)

    def update(self) -> None:
        """Computes what the controls say and replaces the figures' data."""
        if self.is_quiet:
            return
        now = self.settings()
        with self.answering():
            model = named_model(self.model.value, self.chosen)
            view = self._view(model, now)
            self.message.show()
            show_steps(self.figures["step"], view, now.gpus)
            show_memory(self.figures["memory"], view)
            self._say(model, view, now)
            with self.command.hold_sync():
                self.command.line = job_line(model, now)
                self.command.note = "Without --cluster it prints the memory, part by part."

    def _view(self, model: ChosenModel, now: JobSettings) -> JobView:
        """Computes a view; steps of all numbers of GPUs are kept while that number alone moves."""
        any_gpus = replace(now, gpus=1)
        settings, name, view = self._stepped or (None, "", None)
        same = settings == any_gpus and name == model.name
        view = view_job(model, now, view if same else None)
        self._stepped = (any_gpus, model.name, view)
        return view

    def _offer_gpus(self) -> None:
        with self.quietly():
            offer_gpus(self.sliders["gpus"], self.choices["cluster"].value)

    def _say(self, model: ChosenModel, view: JobView, now: JobSettings) -> None:
        row, cluster = view.on(now.gpus), load_cluster(now.cluster)
        of_text = model.architecture.tokens_per_sample > 1
        rate = f"{row.tokens_per_s:,.0f} {'tokens' if of_text else 'samples'}/s"
        self.headings["step"].show(
            f"{time_text(row.step_s)} on {now.gpus:,} GPUs: {row.efficiency:.0%} efficient, {rate}"
        )
        peak = "Activations are not known, so memory is not predicted"
        if view.memory is not None:
            peak = f"{digits(view.memory.peak_bytes / GB)} GB in {view.memory.peak.name}"
            peak += {True: ": fits", False: ": does not fit", None: ""}[view.fits]
        self.headings["memory"].show(peak, without=() if shows_room(view) else ("room",))
        length = f", {model.seq_len:,} tokens" if model.seq_len else ""
        room = ""
        if view.capacity_bytes is not None:
            room = (
                f" A GPU has {view.capacity_bytes / GB:.0f} GB beside the "
                f"{LIBRARIES_BYTES / GB:g} GB of CUDA and libraries."
            )
        if view.largest is not None:
            samples = f"has {counted(view.largest, 'sample')}" if view.largest else "is none"
            room += f" The largest micro-batch that fits {samples}."
        self.caption.show(
            f"{model.name}{length}, {digits(model.architecture.num_parameters / 1e6)} million "
            f"parameters, on {cluster.gpus_per_node} × {cluster.gpu} a node over "
            f"{cluster.network}; computed, not measured. Every GPU computes the same however many "
            "there are (weak scaling). Efficiency is one GPU's step over the step; its bar spans "
            f"90 % of the draws.{room}"
        )


def _heading(colours: dict[str, str], **lines: Key) -> Text:
    keys = {name: Key(colour, "block") for name, colour in colours.items()}
    return Text(heading=True, legend=keys | lines)


def step_figure() -> Figure:
    """Returns an empty plot of the parts of a step, and of efficiency, over numbers of GPUs."""
    made = figure(
        *itertools.starmap(bar, STEP_COLOURS.items()),
        line("efficiency", BLACK, width=3),
        points("chosen", BLACK, symbol="circle", size=12),
        x_title="GPUs",
        y_title="share of the step (%)",
        height=430,
        barmode="stack",
    )
    made.update_yaxes(range=[0, 105], dtick=20)
    made.update_xaxes(tickangle=0)
    return made


def show_steps(made: Figure, view: JobView, gpus: int) -> None:
    """Replaces the data of the steps."""
    *bars, efficiency, chosen = made.data
    numbers = view.steps["gpus"].tolist()
    places, row = list(range(len(numbers))), view.on(gpus)
    with made.batch_update():
        for bar, part in zip(bars, STEP_PARTS.values(), strict=True):
            bar.x, bar.y = places, (100 * view.steps[part] / view.steps["step_s"]).to_numpy()
        efficiency.x, efficiency.y = places, 100 * view.steps["efficiency"].to_numpy()
        chosen.x, chosen.y = [numbers.index(gpus)], [100 * row.efficiency]
        chosen.error_y = {
            "array": [100 * (row.efficiency_high - row.efficiency)],
            "arrayminus": [100 * (row.efficiency - row.efficiency_low)],
            "thickness": 3,
            "width": 8,
        }
        made.layout.xaxis.tickvals = places[::3]
        made.layout.xaxis.ticktext = [f"{number:,}" for number in numbers[::3]]


def memory_figure() -> Figure:
    """Returns an empty plot of memory by part, moment by moment."""
    made = figure(
        *itertools.starmap(bar, MEMORY_COLOURS.items()),
        line("room", BLACK, width=3, dash="dash"),
        x_title="moment of a step",
        y_title="memory (GB)",
        height=430,
        barmode="stack",
    )
    made.update_yaxes(rangemode="tozero")
    made.update_xaxes(tickangle=0)
    return made


def shows_room(view: JobView) -> bool:
    """Returns whether a GPU's memory is drawn: not where it would flatten all else."""
    if view.memory is None or view.capacity_bytes is None:
        return False
    return view.memory.peak_bytes > SMALLEST_SHARE * view.capacity_bytes


def show_memory(made: Figure, view: JobView) -> None:
    """Replaces the data of the memory."""
    *bars, room = made.data
    if view.memory is None:
        clear(made)
        return
    names = [moment.name for moment in view.memory.moments]
    places = list(range(len(names)))
    with made.batch_update():
        for bar, part in zip(bars, MEMORY_PARTS, strict=True):
            sizes = [memory_part(moment.components, part) for moment in view.memory.moments]
            bar.x, bar.y, bar.hovertext = places, [size / GB for size in sizes], names
        room.x = [-0.6, len(names) - 0.4] if shows_room(view) else []
        room.y = [view.capacity_bytes / GB] * 2 if shows_room(view) else []
        backward = next(index for index, name in enumerate(names) if "backward" in name)
        made.layout.xaxis.tickvals = [0, backward, places[-1]]
        made.layout.xaxis.ticktext = ["forward", "backward", "update"]
