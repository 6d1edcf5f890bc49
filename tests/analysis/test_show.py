"""Tables for a reader: what has a row, and what its title is."""

from types import SimpleNamespace

from common.analysis.show import facts, show, told_of

TITLES = {
    "batch": "batch",
    "rate": ("tokens/s at batch {0.batch}", "{:,.0f}"),
    "line.slope": ("slope of {0.line}", "{:.1f}"),
    ("line", "rate"): ("rate", lambda line, rate: line and f"{rate:.0f}"),
}


def test_a_fact_that_is_none_has_no_row_and_titles_name_attributes() -> None:
    line = SimpleNamespace(slope=2.0)
    run = SimpleNamespace(batch=8, rate=1234.0, line=None)
    assert told_of(run, TITLES) == {"batch": "8", "tokens/s at batch 8": "1,234"}
    run.line = line
    assert told_of(run, TITLES)[f"slope of {line}"] == "2.0"
    assert facts(run, TITLES).cells[-1] == ["rate", "1234"]


def test_a_record_without_a_value_keeps_its_column() -> None:
    titles = {"name": "run", "rate": ("rate", "{:.1f}")}
    runs = [SimpleNamespace(name="one", rate=None), SimpleNamespace(name="two", rate=2.0)]
    assert show(runs, titles).cells == [["one", "–"], ["two", "2.0"]]
    assert show(runs[:1], titles).columns == ["run", "rate"]
