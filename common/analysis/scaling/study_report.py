"""The seven results of a scaling study, written whole or not at all: figures, tables, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis.runs import written_whole
from common.analysis.scaling.study import (
    MARK,
    Compared,
    Configuration,
    chosen_runs,
    compare_configurations,
    summary,
    verdict,
)
from common.analysis.scaling.study_figures import FIGURES
from common.analysis.scaling.study_files import read_runs
from common.analysis.scaling.training_run import ScalingRun, data_key
from common.analysis.style import DPI
from common.diagnose.diagnosis import diagnosis_lines
from common.errors import UserError
from common.runtime.paths import project_root, relative_to_project

SUMMARY, LATEX, REPORT = "comprehensive_summary.csv", "summary_table.tex", "performance_report.txt"
ESCAPED = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "%": r"\%",
    "_": r"\_",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
}
FOOTNOTE = "ratio of epoch times as printed; not comparable: samples per epoch not counted."


@dataclass(frozen=True)
class ComprehensiveAnalysis:
    """Speedup, efficiency, throughput and accuracy of text training on one and on several ranks.

    Reads run directories of train_text.py, or the original's <experiment>/metrics.csv, below
    --root. Writes four figures per data set, comprehensive_summary.csv, summary_table.tex (LaTeX
    with booktabs) and performance_report.txt to --out: all of it or nothing.
    """

    root: str = "experiments"
    """Folder that holds the runs."""
    out: str = "experiments/plots"
    """Folder to write to."""
    warmup: int = 1
    """First epochs of each run that no time counts; a run without others is left out."""
    datasets: tuple[str, ...] = ("IMDB", "AGNews")
    """Data sets to analyse; case and punctuation do not matter."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """Compared configurations by data set, and a line for all that could not be used as it was."""

    root: Path
    warmup: int
    compared: dict[str, list[Compared]]
    problems: tuple[str, ...]


def main(settings: ComprehensiveAnalysis) -> None:
    """Reads, compares, writes, prints. Raises UserError where there is nothing to compare."""
    analysis = analyse(settings)
    written = write_results(analysis, Path(settings.out))
    print(report(analysis))
    print(f"\nFigures and tables: {relative_to_project(written)}")


def analyse(settings: ComprehensiveAnalysis) -> Analysis:
    """Compares the runs below ``--root`` by data set.

    Raises UserError for a folder without runs, and where no run can be used.
    """
    if settings.warmup < 0:
        raise UserError(f"--warmup {settings.warmup}: must be 0 or more epochs")
    root = Path(settings.root)
    if not root.is_dir() and (project_root() / root).is_dir():
        root = project_root() / root
    read = read_runs(root)
    problems = [str(problem) for problem in read.problems]
    if not read.runs:
        raise UserError(f"{root}: none of its runs can be used: {'; '.join(problems)}")
    chosen, missing = chosen_runs(read.runs, settings.datasets)
    compared = {}
    for dataset, runs in chosen.items():
        measured = [run for run in runs if len(run.epoch_times_s(settings.warmup))]
        problems += [
            f"{run.name}: all of its {len(run.epochs)} epochs are warm-up; left out"
            for run in runs
            if run not in measured
        ]
        if measured:
            compared[dataset] = compare_configurations(measured, settings.warmup)
    if not compared:
        raise UserError(f"{root}: --warmup {settings.warmup} leaves out every epoch there is")
    return Analysis(root, settings.warmup, compared, (*problems, *missing))


def write_results(analysis: Analysis, out: Path) -> Path:
    """Writes the seven results into ``out``, all of them or none, and returns it.

    Raises UserError where it cannot be written to.
    """
    table = summary_of(analysis)
    with written_whole(out) as folder:
        for dataset, compared in analysis.compared.items():
            for name, draw in FIGURES.items():
                fig = draw(compared, study_caption(analysis, dataset))
                fig.savefig(folder / f"{data_key(dataset)}_{name}.png", format="png", dpi=DPI)
        table.to_csv(folder / SUMMARY, index=False)
        (folder / LATEX).write_text(latex_table(table))
        (folder / REPORT).write_text(report(analysis) + "\n")
    return out


def summary_of(analysis: Analysis) -> pd.DataFrame:
    """Returns comprehensive_summary.csv: all data sets, one below the other."""
    return pd.concat([summary(cases) for cases in analysis.compared.values()], ignore_index=True)


def study_caption(analysis: Analysis, dataset: str) -> str:
    """Returns the hardware and source of a data set's figures."""
    runs = [run for case in analysis.compared[dataset] for run in case.configuration.runs]
    hardware = list(dict.fromkeys(run.hardware for run in runs if run.hardware))
    dates = sorted({str(run.environment.get("start_time", ""))[:10] for run in runs} - {""})
    parts = ["; ".join(hardware) or "hardware not recorded", *dates[-1:]]
    recorded = any(run.stated for run in runs)
    inside = analysis.root.resolve().is_relative_to(project_root())
    source = relative_to_project(analysis.root) if inside else analysis.root.name
    parts.append(f"{'recorded (the original scaling study), ' if recorded else 'runs in '}{source}")
    return f"{dataset}: {'; '.join(parts)}"


def escape(text: str) -> str:
    """Returns the text as LaTeX shows it: special characters are escaped."""
    return "".join(ESCAPED.get(character, character) for character in text)


def latex_table(table: pd.DataFrame) -> str:
    """Returns the summary as a LaTeX table, for booktabs. Marks become superscripts."""
    rows = [" & ".join(map(escape, table.columns))]
    for cells in table.itertuples(index=False):
        rows.append(" & ".join(_latex_cell(str(cell)) for cell in cells))
    marked = table.map(lambda cell: str(cell).endswith(MARK)).to_numpy().any()
    header, *body = [f"{row} \\\\" for row in rows]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        "\\caption{Scaling of text classification}",
        f"\\begin{{tabular}}{{ll{'r' * (len(table.columns) - 2)}}}",
        "\\toprule",
        header,
        "\\midrule",
        *body,
        "\\bottomrule",
        "\\end{tabular}",
    ]
    lines += [f"\\par\\smallskip\\footnotesize $^{{*}}$ {escape(FOOTNOTE)}"] if marked else []
    return "\n".join([*lines, "\\end{table}", ""])


def _latex_cell(cell: str) -> str:
    if cell.endswith(MARK):
        return f"{escape(cell.removesuffix(MARK))}$^{{*}}$"
    return escape(cell)


def report(analysis: Analysis) -> str:
    """Returns performance_report.txt: what was reached, why, and what could not be used."""
    lines = ["Scaling performance report", f"runs in {relative_to_project(analysis.root)}"]
    lines.append(f"first epochs of a run that are left out (warm-up): {analysis.warmup}")
    for dataset, compared in analysis.compared.items():
        lines += ["", dataset, "=" * len(dataset)]
        for case in compared:
            lines += ["", *_lines_of(case)]
    if analysis.problems:
        lines += ["", "What could not be used as it was", "-" * 32]
        lines += [f"- {line}" for line in analysis.problems]
    return "\n".join(line.rstrip() for line in lines)


def _lines_of(case: Compared) -> list[str]:
    configuration = case.configuration
    row = summary([case]).iloc[0]
    names = ", ".join(run.name for run in configuration.runs)
    lines = [f"{configuration.name} ({names})"]
    lines.append(
        f"  {row['Mean Epoch Time (s)']} s an epoch, {row['Throughput (sps)']} samples/s, "
        f"validation accuracy {row['Final Val Acc']} at the end"
    )
    assumed = sorted({field for run in configuration.runs for field in run.assumed})
    if assumed:
        lines.append(f"  read from the folder's name: {', '.join(assumed).replace('_', ' ')}")
    if not case.is_base:
        lines += [f"  {line}" for line in _speedup_lines(case)]
    for run in configuration.runs:
        lines += [f"  {line}" for line in diagnosis_of(run, case.base)]
    return lines


def _speedup_lines(case: Compared) -> list[str]:
    if case.speedup is not None:
        return [f"Speedup {case.speedup}: {verdict(case.speedup)}"]
    lines = [f"Speedup n/a: {case.reason}"]
    if case.printed is not None:
        lines = [
            f"As printed{MARK} {case.printed}: {verdict(case.printed)}",
            f"{MARK} not comparable: {case.reason}",
        ]
    if case.per_sample is not None:
        run = case.configuration.runs[0]
        how = f"not counted; {run.stated.how_known}" if run.stated else ""
        if run.identity.processed_per_epoch is not None:
            how = "counted"
        lines.append(f"Per sample {case.per_sample}: {verdict(case.per_sample)}")
        lines.append(
            f"samples an epoch: {run.processed_per_epoch:,} computed, "
            f"{run.distinct_per_epoch:,} different ones ({how})"
        )
    return lines


def diagnosis_of(run: ScalingRun, base: Configuration | None) -> list[str]:
    """Returns the diagnosis of one of our runs on several ranks; nothing for the original's."""
    if not run.environment or run.identity.world_size == 1:
        return []
    other = base.runs[0] if base else None
    beside = other.folder if other and other.environment and other is not run else None
    try:
        return [f"Diagnosis of {run.name}:", *diagnosis_lines(run.folder, beside)]
    except UserError as error:
        return [f"Diagnosis of {run.name}: none ({error})"]
