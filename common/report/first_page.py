"""The first page of a report: this machine, what was found, four small figures, what still runs.

One ``FirstPage`` is shown in three places: at the head of index.html, on page 1 of report.pdf, and
in the terminal at the end of a run.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from common.analysis.findings.figures import SmallFigure
from common.analysis.findings.finding import MEASURED, PREDICTED, Finding
from common.analysis.html import rendered
from common.analysis.picture import svg
from common.report.document import assignment_title, svg_address
from common.report.timetable import Timetable

TEMPLATE = Path(__file__).with_name("first_page.html.j2")
STYLE = Path(__file__).with_name("first_page.css")
RUNNING, COMPLETE = "running", "complete"
MOST_SETTLED = 4
"""Number of settled findings that come first."""
IMPOSSIBLE = "What cannot be: something is wrong with these measurements"
"""Heading of violations."""


@dataclass(frozen=True, eq=False)
class FirstPage:
    """Contents of the first page.

    Attributes:
        machine: one line on the hardware, one on the software.
        findings: findings of the assignments that were run, in order.
        figures: at most one an assignment.
        machine_state: whether the machine was quiet, in a sentence; empty where nothing was
            measured.
        violations: sentences on values that cannot be.
        not_run: assignments that this run is not about.
        state: running, complete, failed or interrupted.
        reason: why it failed or was interrupted.
        made: when this page was made.
        timetable: timetable of the run; None where nothing was run.
    """

    machine: tuple[str, ...]
    findings: tuple[Finding, ...]
    figures: tuple[SmallFigure, ...]
    machine_state: str = ""
    violations: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    state: str = COMPLETE
    reason: str = ""
    made: str = ""
    timetable: Timetable | None = None

    @property
    def answered(self) -> tuple[Finding, ...]:
        """Returns the findings that have an answer."""
        return tuple(finding for finding in self.findings if finding.answer is not None)

    @property
    def groups(self) -> dict[str, tuple[Finding, ...]]:
        """Returns the findings that have an answer by what they are worth, under their titles.

        Of those that are measured and settled the most important come first.
        """
        answered = sorted(self.answered, key=lambda finding: finding.question.priority)
        measured = [finding for finding in answered if finding.answer.kind == MEASURED]
        settled = [finding for finding in measured if finding.answer.is_settled]
        groups = {
            "Settled": settled[:MOST_SETTLED],
            "Not settled": [finding for finding in measured if not finding.answer.is_settled],
            "Settled as well": settled[MOST_SETTLED:],
            "Predicted": [finding for finding in answered if finding.answer.kind == PREDICTED],
        }
        return {title: tuple(findings) for title, findings in groups.items() if findings}

    @property
    def unanswered(self) -> tuple[Finding, ...]:
        """Returns the findings that have none, with the reason."""
        return tuple(finding for finding in self.findings if finding.answer is None)

    @property
    def left_out(self) -> str:
        """Returns the assignments that were not run, in words; empty where all were."""
        names = ", ".join(map(assignment_title, self.not_run))
        return f"Not in this run: {names}." if names else ""


def machine_lines(environment: Mapping) -> tuple[str, str]:
    """Returns the hardware and the software of a run's environment record, a line each."""
    gpus = environment.get("gpus") or []
    cpu = environment.get("cpu", {})
    cores = f"{cpu.get('cores', '?')} cores of {cpu.get('model', 'an unknown CPU')}"
    device = f"{len(gpus)} × {gpus[0]['name']}, {cores}" if gpus else f"{cores}, no GPU used"
    host = environment.get("host")
    elsewhere = (
        "; another machine than this one" if host not in (None, socket.gethostname()) else ""
    )
    packages = environment.get("packages", {})
    software = [
        environment.get("system", ""),
        f"Python {environment.get('python', '?')}",
        f"torch {packages.get('torch', '?')}",
        f"measured {str(environment.get('start_time', '?'))[:10]}",
    ]
    commit = (environment.get("git") or {}).get("commit")
    if commit:
        software.append(f"commit {commit[:7]}")
    return f"{device}{elsewhere}", ", ".join(filter(None, software))


def as_html(page: FirstPage, anchors: Collection[str] = ()) -> str:
    """Returns the page's section for index.html.

    Args:
        page: The first page.
        anchors: Anchors that the report has; a finding without one is no link.
    """
    pictures = [(small, svg_address(svg(small.figure))) for small in page.figures]
    return rendered(
        TEMPLATE, page=page, anchors=set(anchors), pictures=pictures, impossible=IMPOSSIBLE
    )


def as_typst(page: FirstPage, *, with_figures: bool = True) -> tuple[str, dict[str, bytes]]:
    """Returns the page as Typst, and the files of its figures by the names used in there."""
    figures = page.figures if with_figures else ()
    files = {f"first-{small.assignment}.svg": svg(small.figure).encode() for small in figures}
    lines = [
        "#set par(justify: false, leading: 0.5em)",
        "#set text(hyphenate: false)",
        "#heading(level: 2, outlined: false)[What was found]",
    ]
    about = [*page.machine, *filter(None, [page.machine_state])]
    lines += [f"#text(size: 9pt)[{_typst(line)}]\n" for line in about]
    if page.state != COMPLETE:
        lines.append(f"#strong[{_typst(f'This run was not completed: {page.reason}')}]\n")
    if page.violations:
        sentences = " ".join(f"- {_typst(sentence)}\n" for sentence in page.violations)
        lines.append(
            "#block(stroke: 0.8pt + red, inset: 6pt, width: 100%)[#text(size: 8.5pt)["
            f"#strong[{_typst(IMPOSSIBLE)}]\n\n{sentences}]]\n"
        )
    for title, findings in page.groups.items():
        rows = [_typst_row(finding) for finding in findings]
        lines.append(
            f"#block(sticky: true)[#text(size: 10pt)[#strong[{_typst(title)}]]]\n"
            "#table(columns: (27%, 1fr), align: (left, left), inset: (x: 4pt, y: 3pt), "
            "stroke: (x, y) => (bottom: 0.4pt + luma(200)),\n" + "\n".join(rows) + "\n)"
        )
    for finding in page.unanswered:
        text = f"{finding.question.title}: not there. {finding.missing}."
        lines.append(f"#text(size: 8pt)[{_typst(text)}]\n")
    if page.left_out:
        lines.append(f"#text(size: 8pt)[{_typst(page.left_out)}]\n")
    pictures = [
        f'[#text(size: 8.5pt, weight: "bold")[{_typst(small.title)}] #image('
        f"{json.dumps(f'first-{small.assignment}.svg')}, height: 3.7cm, "
        f"alt: {json.dumps(small.alt)})],"
        for small in figures
    ]
    if pictures:  # with the findings' verdicts and commands page 1 is full
        lines.append("#pagebreak(weak: true)")
        lines.append("#grid(columns: (1fr, 1fr), gutter: 6pt,\n" + "\n".join(pictures) + "\n)")
    return "#[\n" + "\n".join(lines) + "\n]", files


def print_page(page: FirstPage, console: Console) -> None:
    """Prints the findings for a terminal: a line with the number, and one that says how sure."""
    console.print(f"\n[bold]What was found[/bold] on {escape(page.machine[0])}", highlight=False)
    if page.machine_state:
        console.print(f"  {escape(page.machine_state)}", highlight=False)
    for sentence in page.violations:
        console.print(f"  [red]Cannot be:[/red] {escape(sentence)}", highlight=False)
    for group, findings in page.groups.items():
        console.print(f"[bold]{group}[/bold]")
        for finding in findings:
            title, answer = finding.question.title, finding.answer
            marks = "".join(f" [yellow]({escape(mark)})[/yellow]" for mark in finding.marks)
            number = f"  {escape(title)}: [bold]{escape(answer.text)}[/bold]{marks}"
            console.print(number, highlight=False)
            for line in filter(None, (answer.spread, answer.to_settle)):
                console.print(Padding(f"[dim]{escape(line)}[/dim]", (0, 0, 0, 6)))
    for finding in page.unanswered:
        text = f"  {finding.question.title}: not there. {finding.missing}"
        console.print(escape(text), highlight=False)
    if page.left_out:
        console.print(f"  {escape(page.left_out)}", highlight=False)


def _typst_row(finding: Finding) -> str:
    """Returns a finding as two cells of a table: its title, and what was found."""
    question, answer = finding.question, finding.answer
    marks = "".join(f" _({_typst(mark)})_" for mark in finding.marks)
    settle = f"#text(size: 7.2pt)[{_typst(answer.to_settle)}] \\ " if answer.to_settle else ""
    return (
        f"[{_typst_link(question.anchor, question.title)}], [#strong[{_typst(answer.text)}]{marks} "
        f"\\ {settle}#text(size: 7.2pt)[{_typst(answer.spread + '.')} "
        f"#emph[{_typst(question.meaning)}]]],"
    )


def _typst(text: str) -> str:
    """Returns text as a string of Typst, in which no letter has a meaning."""
    return f"#{json.dumps(text, ensure_ascii=False)}"


def _typst_link(anchor: str, text: str) -> str:
    """Returns a link to a label, with its page; the text alone where there is no such label."""
    label = f"label({json.dumps(anchor)})"
    return (
        f"#context {{ let found = query({label}); if found.len() > 0 {{ "
        f"link({label}, [{_typst(text)}]); text(size: 8pt, fill: luma(90))"
        f"[ \\ page #counter(page).at(found.first().location()).first()] "
        f"}} else {{ [{_typst(text)}] }} }}"
    )
