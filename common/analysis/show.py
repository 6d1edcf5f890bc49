"""Shows a data frame, or a few facts, as a table: a column knows its title, unit and format.

A column's name ends in its unit (``step_ms``, ``peak_bytes``), its title has the unit in brackets
(``step (ms)``, ``peak (MiB)``), and values are converted from the one to the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import pandas as pd
from pandas.api.types import is_scalar

from common.judged import Judged, Verdict
from common.samples import Interval

Form = str | Callable[..., str] | Mapping[object, str]
"""A format string, a function that returns text, or the text of each value."""
Titles = Mapping[str | tuple[str, ...], str | tuple[str, Form]]
"""Column → its title, or its title and format. Several columns are one, such as an interval, whose
format has a place for each; a function is called with all of them."""

UNITS = {
    "bytes": {"MiB": 2**20, "MB": 1e6},
    "mib": {"MiB": 1},
    "ms": {"ms": 1},
    "s": {"s": 1, "ms": 1e-3, "µs": 1e-6},
    "flops": {"GFLOP": 1e9},
    "flops_per_s": {"GFLOP/s": 1e9, "TFLOP/s": 1e12},
    "bytes_per_s": {"GB/s": 1e9},
    "bandwidth": {"GB/s": 1e9},
}
"""Unit of a column → unit of its title → its size; a title gets the first."""
TITLES: Titles = {
    "name": "strategy",
    "accumulation": "micro-batches",
    "noise": "range of rounds",
    "above_noise": "can be told from noise",
    "tokens_per_s": "tokens/s",
    "throughput_samples_per_s": "samples/s",
    "bucket_cap_mib": "cap (MiB)",
    "num_buckets": "buckets",
    "gpus": "GPUs",
    "mfu": "MFU",
}
"""Titles that do not follow from a column's name."""
FORMATS: Mapping[str, Form] = {
    **dict.fromkeys(("tokens/s", "samples/s", "bytes", "GPUs", "most GPUs"), "{:,.0f}"),
    **dict.fromkeys(
        (
            "speedup",
            "over DDP",
            "gloo over DDP",
            "NCCL over DDP",
            "worst / best",
            "ratio",
            "per sample",
        ),
        "{:.2f}",
    ),
    **dict.fromkeys(("least", "greatest", "step over static", "P95", "median"), "{:.2f}"),
    **dict.fromkeys(("hidden", "range of rounds", "of DDP's", "exposed share", "MFU"), "{:.0%}"),
    **dict.fromkeys(("FLOP/B", "GFLOP/s", "GB/s"), "{:.1f}"),
    **dict.fromkeys(("error", "gain", "added", "watched / plain"), "{:+.1%}"),
    **dict.fromkeys(("median error", "mean error", "worst error", "regret", "waiting"), "{:.1%}"),
    **dict.fromkeys(
        ("accuracy", "efficiency", "noise floor", "largest error", "within std"), "{:.1%}"
    ),
    "at the sweep's own speed": "{:.1%}",
    "last gradient's share": "{:.0%}",
    "g (ns per byte)": "{:.3g}",
    "calls": "{:.0f}",
    "share": "{:.1%}",
    "of roof": "{:.0%}",
    "cap (MiB)": "{:g}",
    "chosen cap (MiB)": "{:g}",
    "b* (MiB)": "{:.3g}",
}
"""Formats of titles; of others the unit decides."""
BY_UNIT = {
    **dict.fromkeys(("ms", "µs", "MiB", "MB"), "{:,.1f}"),
    **dict.fromkeys(("s", "GB/s", "GFLOP"), "{:,.2f}"),
    **dict.fromkeys(("tokens", "ranks", "GPUs", "Mbit/s"), "{:,.0f}"),
    "TFLOP/s": "{:,.3g}",
    "nats": "{:.2g}",
}
ELSE = "{}"


class Table:
    """A data frame as a notebook's output.

    ``formats`` are those that the columns' titles do not tell; columns of ``left`` are set on the
    left, whatever is in them.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        formats: Mapping[str, Form] | None = None,
        left: Collection[str] = (),
    ) -> None:
        self.columns = [str(column) for column in frame.columns]
        self.left = left
        forms = [(formats or {}).get(title, format_of(title)) for title in self.columns]
        self.cells = [
            [
                _text(form, *value) if isinstance(value, tuple) else _text(form, value)
                for form, value in zip(forms, row, strict=True)
            ]
            for row in frame.itertuples(index=False)
        ]

    def _repr_markdown_(self) -> str:
        columns = zip(self.columns, *self.cells, strict=True)
        rules = [_rule(*column, left=column[0] in self.left) for column in columns]
        lines = [self.columns, rules, *self.cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def show(
    frame: pd.DataFrame | Sequence[object] | None, titles: Titles | Collection[str] = ()
) -> Table | None:
    """Returns a frame, or a row for each of some records, as a table; None where there is none.

    Args:
        frame: A table whose columns have names of data, or titles; or records, of which ``titles``
            names attributes.
        titles: Columns to show, with the titles that do not follow from their names; by default
            all. A column without any value is left out.
    """
    if frame is None:
        return None
    if not isinstance(frame, pd.DataFrame):
        rows = [_texts(record, titles) for record in frame]
        headings = (title[0] if isinstance(title, tuple) else title for title in titles.values())
        return Table(pd.DataFrame(rows, columns=None if rows else [*headings]))
    if not isinstance(titles, Mapping):
        titles = dict.fromkeys(titles or [*filter(None, frame.index.names), *frame])
    columns, formats = {}, {}
    for name, heading in titles.items():
        heading = title_of(name) if heading is None else heading
        title, form = heading if isinstance(heading, tuple) else (heading, None)
        values = _column(frame, name, title)
        if values and not isinstance(name, tuple) and pd.isna(values).all():  # not measured
            continue
        columns[title] = values
        if form is not None:
            formats[title] = form
    return Table(pd.DataFrame(columns), formats)


def facts(values: object, titles: Titles | None = None) -> Table:
    """Returns a table of the few numbers that a text is about: a title and a value in each row.

    Args:
        values: Title → text; or any object or mapping of which ``titles`` names attributes.
        titles: Attributes to show, as in ``told_of``.
    """
    texts = values if titles is None else told_of(values, titles)
    frame = pd.DataFrame({"": texts.keys(), "value": [str(value) for value in texts.values()]})
    return Table(frame, left=("", "value"))


def told_of(values: object, titles: Titles) -> dict[str, str]:
    """Returns title → text of an object's attributes (``run.name``), or of a mapping's values.

    A title may name attributes, too: ``tokens/s at batch {0.batch_size}``. An attribute that is
    None is left out, and so are several whose format returns None.
    """
    texts = _texts(values, titles)
    return {title.format(values): text for title, text in texts.items() if text is not None}


def _texts(values: object, titles: Titles) -> dict[str, str | None]:
    texts: dict[str, str | None] = {}
    for name, heading in titles.items():
        title, form = heading if isinstance(heading, tuple) else (heading, format_of(heading))
        names = name if isinstance(name, tuple) else (name,)
        value, *more = [_attribute(values, part) for part in names]
        is_missing = value is None and not more
        texts[title] = None if is_missing else _text(form, value, *more)
    return texts


def _attribute(values: object, path: str) -> object:
    """Returns an attribute of an attribute …; None below one that is None."""
    if isinstance(values, Mapping | pd.Series):
        return values[path]
    for name in path.split("."):
        values = None if values is None else getattr(values, name)
    return values


def mib(size_bytes: float) -> str:
    """Formats a size under a title that says MiB."""
    return f"{size_bytes / 2**20:,.1f}"


def interval_format(form: str = "{:.2f}", *, less: float = 0.0) -> Callable[[Judged], str]:
    """Returns the format of a judged number's interval; of a ratio's change where ``less`` is 1."""
    return lambda judged: judged.interval.map(lambda end: end - less).text(form)


def judged_format(form: str = "{:.2f}") -> Callable[[Judged], str]:
    """Returns the format of a judged number: its interval, and its verdict where not settled."""

    def text(judged: Judged) -> str:
        if judged.verdict is Verdict.NOT_MEASURED:
            return judged.said
        ends = f" ({judged.interval.text(form)})" if judged.interval.is_told else ""
        worth = "" if judged.is_settled else f": {judged.said}"
        return f"{form.format(judged.estimate)}{ends}{worth}"

    return text


RATIO = ["ratio", "ratio_low", "ratio_high"]


def ratio_table(ratios: Mapping[str, Judged], *, verdict: str) -> pd.DataFrame:
    """Returns a row per arm: the columns ``RATIO``, the verdict under that name, and judged."""
    rows = {
        name: (ratio.estimate, ratio.interval.low, ratio.interval.high, ratio.said, ratio)
        for name, ratio in ratios.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=[*RATIO, verdict, "judged"])


def ends_format(interval: Interval) -> str:
    """Returns an interval beside whose cell the number of rounds stands."""
    return interval.text(unit="")


def title_of(name: str) -> str:
    """Returns a column's title.

    >>> title_of("exposed_ms"), title_of("peak_bytes"), title_of("noise")
    ('exposed (ms)', 'peak (MiB)', 'range of rounds')
    """
    if name in TITLES:
        return TITLES[name]
    unit = _unit_of(name)
    if unit is None:
        return name.replace("_", " ")
    sizes = UNITS[unit]
    of_title = "MiB" if unit == "bytes" else next(key for key in sizes if sizes[key] == 1)
    return f"{name.removesuffix(f'_{unit}').replace('_', ' ')} ({of_title})"


def format_of(title: str) -> Form:
    """Returns the format of what stands under a title."""
    if title in FORMATS:
        return FORMATS[title]
    unit = re.search(r"\(([^()]*)\)$", title)
    return BY_UNIT.get(unit[1], ELSE) if unit else ELSE


def _unit_of(name: str) -> str | None:
    """Returns the longest unit that a column's name ends in."""
    return max((unit for unit in UNITS if name.endswith(f"_{unit}")), key=len, default=None)


def _column(frame: pd.DataFrame, name: str | tuple[str, ...], title: str) -> list:
    if isinstance(name, tuple):
        return list(zip(*(frame[part] for part in name), strict=True))
    unit, of_title = _unit_of(str(name)), re.search(r"\(([^()]*)\)$", title)
    size = UNITS[unit].get(of_title[1], 1) if unit and of_title else 1
    values = frame[name] if name in frame else frame.index.to_series()
    return list(values if size == 1 else values / size)


def _rule(header: str, *cells: str, left: bool = False) -> str:
    """Returns the line between header and cells, as long as the column is wide.

    Where a table does not fit on a line, pandoc gives its columns these widths. Names stand on the
    left, numbers on the right.

    >>> _rule("worst case", "1.5%", "12.5%"), _rule("", "balanced", "replay")
    ('-------:', ':----------')
    """
    width = max(map(len, (*cells, *header.split())), default=0) + 3  # and what is left around them
    filled = [cell for cell in cells if cell not in ("", "–")]
    names = left or all(cell[:1].isalpha() for cell in filled or cells)
    return f":{'-' * (width - 1)}" if names else f"{'-' * (width - 1)}:"


def _text(form: Form, *values: object) -> str:
    if isinstance(form, Mapping):
        return form[values[0]]
    if callable(form) and len(values) > 1:
        return form(*values)
    if any(is_scalar(value) and pd.isna(value) for value in values):
        return "–"
    if form == ELSE and isinstance(values[0], float | np.floating):
        form = "{:.2f}"
    if form == ELSE and isinstance(values[0], bool | np.bool_):
        return "yes" if values[0] else "no"
    if isinstance(form, str) and isinstance(values[0], str):
        return values[0]  # such as the reason why there is no number
    text = form(*values) if callable(form) else form.format(*values)
    return re.sub(r"^-(?=0(\.0*)?%?$)", "", text)  # nothing is less than zero by nothing
