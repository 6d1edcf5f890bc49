"""The tab of plans: memory for time of any model on a cluster, and the plan for a memory."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from functools import lru_cache

from common.analysis.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from common.errors import UserError
from common.explore.chosen_model import ChosenModel, named_model, offered_names
from common.explore.clusters.cluster_job import numbers_of_gpus, offer_gpus
from common.explore.controls import (
    Key,
    Slider,
    Tab,
    Text,
    choice,
    on_change,
    steps_between,
    time_text,
)
from common.explore.figures import Figure, clear, figure, line, points
from common.perfmodel.cluster.clusters import known_clusters, load_cluster
from common.planning.answer import nothing_fits, why_not_others
from common.planning.cluster_times import peak_of, search_cluster
from common.planning.search import Searched, choose
from common.planning.space import PRECISIONS, STRATEGIES, Question, fits
from common.runtime.wording import digits

CLUSTER, GPUS, SAMPLES = "h100-ib", 64, 8
"""The cluster, the GPUs and a GPU's samples of a step that the tab starts with."""
COLOURS = dict(zip(STRATEGIES, (BLACK, BLUE, SKY, GREEN, ORANGE, PURPLE), strict=True))
GB = 1e9
SLOWEST = 3
"""Bound on the times of plans that are drawn, as multiples of the best one's."""


@dataclass(frozen=True)
class Asked:
    """What the controls ask but for the memory, which moves a line in what was searched."""

    cluster: str
    gpus: int
    samples: int
    precision: str


@lru_cache(maxsize=16)
def searched_for(model: ChosenModel, wanted: Asked) -> Searched:
    """Returns every plan that may be taken in the memory of the cluster's GPU, or in less.

    Raises UserError where times or memory are not known.
    """
    cluster = load_cluster(wanted.cluster)
    memory = peak_of(cluster).memory_bytes
    if memory is None:
        raise UserError(f"the memory of a {cluster.gpu} is not known")
    question = Question(
        architecture=model.architecture,
        ranks=wanted.gpus,
        ranks_per_node=cluster.gpus_per_node,
        global_batch=wanted.gpus * wanted.samples,
        memory_bytes=memory,
        precisions=(wanted.precision,),
    )
    return search_cluster(question, cluster)


def within(searched: Searched, memory_bytes: float) -> Searched:
    """Returns what a search with less memory finds: nothing that fits in less is left out."""
    question = replace(searched.question, memory_bytes=memory_bytes)
    timed = [plan for plan in searched.timed if fits(question, plan.sized)]
    too_large = [plan.sized for plan in searched.timed if plan not in timed]
    refused = sorted((*too_large, *searched.refused), key=lambda plan: plan.peak_bytes)
    return replace(
        searched,
        question=question,
        best=choose(question, timed),
        frontier=tuple(plan for plan in searched.frontier if plan in timed),
        timed=tuple(timed),
        refused=tuple(refused),
    )


class PlanTab(Tab):
    """The widgets of the tab. Nothing is searched before ``update``, as that takes seconds."""

    def __init__(self, chosen: ChosenModel | None = None) -> None:
        self.chosen = chosen
        self.model = choice("Model", offered_names(chosen))
        self.choices = {
            "cluster": choice("Cluster", known_clusters(), CLUSTER),
            "precision": choice("Precision", list(PRECISIONS), "bfloat16"),
        }
        numbers = [n for n in numbers_of_gpus(load_cluster(CLUSTER)) if n > 1]
        self.sliders: dict[str, Slider] = {
            "gpus": Slider("GPUs", numbers, GPUS, "{:,}".format),
            "samples": Slider("samples of a GPU in a step", [2**n for n in range(9)], SAMPLES),
        }
        self.memory: Slider = Slider("memory of a GPU (GB)", [80.0], 80.0, digits)
        legend = {name: Key(colour, "block") for name, colour in COLOURS.items()}
        self.heading = Text(heading=True, legend=legend | {"memory": Key(RED, "dashes")})
        self.figure = plans_figure()
        super().__init__({"plans": self.heading}, {"plans": self.figure})
        controls = [self.model, *self.choices.values(), *self.sliders.values()]
        self.widget = self.page([*controls, self.memory])
        on_change([self.choices["cluster"]], self._offer_gpus)
        on_change(controls, self.update)
        on_change([self.memory], self._show)
        self._searched: tuple[ChosenModel, Searched] | None = None

    def update(self) -> None:
        """Searches the plans that the controls ask for, and shows them."""
        if self.is_quiet:
            return
        values = {name: control.value for name, control in (self.choices | self.sliders).items()}
        self._searched = None
        with self.answering():
            model = named_model(self.model.value, self.chosen)
            searched = searched_for(model, Asked(**values))
            self._searched = model, searched
            self.message.show()
            most = searched.question.memory_bytes / GB
            is_moved = self.memory.value in self.memory.values[:-1]
            kept = min(self.memory.value, most) if is_moved else most
            self.memory.offer(sorted({*steps_between(2, most, extra=most), kept}), kept)
            self._show()

    def _offer_gpus(self) -> None:
        with self.quietly():
            offer_gpus(self.sliders["gpus"], self.choices["cluster"].value, least=2)

    def _show(self) -> None:
        """Shows what was searched, within the memory that the slider says."""
        if self._searched is None:
            return
        model, searched = self._searched
        fitting = within(searched, self.memory.value * GB)
        question, best = fitting.question, fitting.best
        show_plans(self.figure, searched, fitting)
        if best is None:
            self.heading.show("Nothing fits")
            self.caption.show(*nothing_fits(fitting))
        else:
            self.heading.show(
                f"{best.plan.label}: {time_text(best.time.step_s)}, "
                f"{digits(best.peak_bytes / GB)} GB at the peak"
            )
            self.caption.show("Computed, not measured. Why not:", *why_not_others(fitting, best))
        flags = [*model.flags, "--cluster", self.choices["cluster"].value]
        flags += ["--gpus", f"{question.ranks}", "--global-batch", f"{question.global_batch}"]
        flags += ["--memory", f"{self.memory.value:g}GB", "--precision", question.precisions[0]]
        self.command.line = shlex.join(["uv", "run", "ddplab", "plan", *flags])


def plans_figure() -> Figure:
    """Returns an empty plot of the time of plans over their memory, a colour for each strategy."""
    made = figure(
        *(points(name, colour, symbol="circle", size=9) for name, colour in COLOURS.items()),
        line("frontier", BLACK, width=2),
        points("the plan to take", RED, symbol="star", size=20),
        line("memory", RED, width=3, dash="dash"),
        x_title="memory at the peak (GB)",
        y_title="step (s)",
        height=430,
    )
    made.update_yaxes(rangemode="tozero")
    made.update_xaxes(rangemode="tozero")
    return made


def show_plans(made: Figure, searched: Searched, fitting: Searched) -> None:
    """Replaces the data: all plans; those that fit lie to the left of the memory's line."""
    *strategies, front, star, edge = made.data
    if not searched.timed:
        clear(made)
        return
    slowest_s = SLOWEST * searched.timed[0].time.step_s
    with made.batch_update():
        for trace in strategies:
            drawn = [
                plan
                for plan in searched.timed
                if plan.plan.strategy == trace.name and plan.time.step_s <= slowest_s
            ]
            trace.x = [plan.peak_bytes / GB for plan in drawn]
            trace.y = [plan.time.step_s for plan in drawn]
            trace.hovertext = [plan.plan.label for plan in drawn]
        kept = [plan for plan in searched.frontier if plan.time.step_s <= slowest_s]
        front.x = [plan.peak_bytes / GB for plan in kept]
        front.y = [plan.time.step_s for plan in kept]
        best = [fitting.best] if fitting.best else []
        star.x = [plan.peak_bytes / GB for plan in best]
        star.y = [plan.time.step_s for plan in best]
        edge.x, edge.y = [fitting.question.usable_bytes / GB] * 2, [0, slowest_s]
