"""A page of a study: its trials, their history, the importance of each key, and parallel coordinates.

Plots are Optuna's. Of a study in segments they compare the trials at the end of the first one, which all have.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.config.study import StudyFile
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_atomic
from rlhpc.launch.studies.journal import open_study
from rlhpc.launch.studies.segments import results_of
from rlhpc.launch.studies.study_folder import StudyFolder
from rlhpc.launch.studies.trials_table import StudyTable, read_table

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_FEWEST, _FEWEST_FOR_IMPORTANCE = 2, 8  # results that plots and importance need
_PLOTS = (
    ("History", "plot_optimization_history"),
    ("Parallel coordinates", "plot_parallel_coordinate"),
    ("Values of each key", "plot_slice"),
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #ddd; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def write_page(folder: StudyFolder, file: Path) -> None:
    """Writes the page, which makes no request. Raises UserError before two trials have results, or without
    matplotlib."""
    if find_spec("matplotlib") is None:
        raise UserError("needs matplotlib", where="study plot", remedy="pip install matplotlib")
    table = read_table(folder)
    compared = compared_trials(folder, table.study)
    count = len(compared.get_trials(deepcopy=False))
    if count < _FEWEST:
        raise UserError(
            f"{count} trial(s) with a result, but the page needs {_FEWEST}",
            where=str(folder.path),
            remedy="see `rlhpc study status`",
        )
    write_atomic(file, _PAGE.format(title=escape(table.study.name), body="\n".join(_parts(table, compared))))


def compared_trials(folder: StudyFolder, study: StudyFile) -> Study:
    """The trials that have results, in memory, each with the number by which they are compared."""
    import optuna

    with folder.locked():
        trials = open_study(folder, study).get_trials(deepcopy=False)
    found = optuna.create_study(direction=study.objective.goal)
    for trial in trials:
        if (result := _result(trial)) is not None:
            made = optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, value=result)
            found.add_trial(made)
    return found


def importance(study: Study) -> dict[str, float]:
    """Share of each key in reaching good results (PED-ANOVA, Watanabe et al. 2023), largest first; empty if the results
    do not tell."""
    import optuna

    if len(study.get_trials(deepcopy=False)) < _FEWEST_FOR_IMPORTANCE:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that all shares are equal, because the good trials are all trials
        try:
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
        except (RuntimeError, ValueError, UserWarning):
            return {}


def _result(trial: FrozenTrial) -> float | None:
    results = results_of(trial)
    return results[0] if results else trial.value if trial.state.name == "COMPLETE" else None


def _parts(table: StudyTable, compared: Study) -> list[str]:
    segments, words = table.study.segments, f"{table.objective_words}. {table.counts_words}."
    parts = [f"<h1>{escape(table.study.name)}</h1>", f"<p>{escape(words)}</p>"]
    if segments is not None:
        parts.append(f"<p>Trials are compared at the end of the first segment, step {segments.steps[0]}.</p>")
    shares = [[key, f"{share:.0%}"] for key, share in importance(compared).items()]
    parts += ["<h2>Importance</h2>", "<p>Share of each key in reaching good results, among the values tried.</p>"]
    parts.append(_rows(["key", "share"], shares) if shares else "<p>These results do not tell.</p>")
    for title, name in _PLOTS:
        parts += [f"<h2>{title}</h2>", _picture(name, title, compared, table.study.objective.metric)]
    parts += ["<h2>Trials</h2>", _rows(table.head, table.cells())]
    if table.best is not None:
        parts.append("<p>* the best; one run each: compare it by several seeds before you believe it.</p>")
    return parts


def _picture(name: str, title: str, study: Study, metric: str) -> str:
    """A plot of Optuna as an image in the page."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():  # Optuna sets a style
        warnings.simplefilter("ignore")  # a key with one value
        matplotlib.use("svg")
        from matplotlib import pyplot
        from optuna.visualization import matplotlib as plots

        getattr(plots, name)(study, target_name=metric)
        figure = pyplot.gcf()
        figure.set_size_inches(9.0, 4.5)
        written = io.BytesIO()
        figure.savefig(written, format="svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}">'


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    title = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{title}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
