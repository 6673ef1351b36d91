"""A page of a study: its trials, their history, the importance of each key, and parallel coordinates.

Plots are Optuna's. Of a study in segments they compare the trials at the end of the first one, which all have.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.core.errors import UserError
from rlhpc.core.files import write_atomic
from rlhpc.launch.studies.advance import objective_of, show_value
from rlhpc.launch.studies.halving import results_of
from rlhpc.launch.studies.journal import open_study
from rlhpc.launch.studies.study_folder import StudyFolder, read_study
from rlhpc.launch.studies.trials_table import StudyTable, TrialRow, read_table

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_FEWEST = 2  # results that a plot needs
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
td:last-child, th:last-child, td:nth-child(2), th:nth-child(2) { text-align: left; }
tr.best { font-weight: bold; }
img { max-width: 100%; }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{name}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def write_page(folder: StudyFolder, file: Path) -> None:
    """Writes the page, which makes no request. Raises UserError before two trials have results."""
    table = read_table(folder)
    with folder.locked():
        trials = open_study(folder, table.study).get_trials(deepcopy=False)
    results = {trial.number: result for trial in trials if (result := result_of(trial)) is not None}
    if len(results) < _FEWEST:
        raise UserError(
            f"{len(results)} trial(s) with a result, but a plot needs {_FEWEST}",
            where=str(folder.path),
            remedy="see `rlhpc study status`",
        )
    compared = _in_memory(table, [trial for trial in trials if trial.number in results], results)
    write_atomic(file, _PAGE.format(policy=_POLICY, style=_STYLE, name=_text(table.study.name), body=_body(table, compared)))


def result_of(trial: FrozenTrial) -> float | None:
    """The number by which trials are compared, whatever their segment; None before a trial has one."""
    results = results_of(trial)
    return results[0] if results else trial.value if trial.state.name == "COMPLETE" else None


def importance(study: Study) -> dict[str, float]:
    """Share of the keys in reaching good results (PED-ANOVA, Watanabe et al. 2023), largest first; empty if the results
    do not tell."""
    import optuna

    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except (RuntimeError, ValueError):
        return {}


def study_of_results(folder: StudyFolder) -> Study:
    """The trials that have results, each with that by which they are compared, in the order of their numbers."""
    table = read_table(folder)
    with folder.locked():
        trials = open_study(folder, read_study(folder)).get_trials(deepcopy=False)
    return _in_memory(table, trials, {t.number: r for t in trials if (r := result_of(t)) is not None})


def _in_memory(table: StudyTable, trials: Sequence[FrozenTrial], results: dict[int, float]) -> Study:
    import optuna

    study = optuna.create_study(direction=table.study.objective.goal)
    study.add_trials(
        [
            optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions, value=results[trial.number]
            )
            for trial in trials
        ]
    )
    return study


def _body(table: StudyTable, compared: Study) -> str:
    objective, segments = objective_of(table.study), table.study.segments
    higher = "higher" if objective.goal == "maximize" else "lower"
    where = f", at the end of the first segment (step {segments.steps[0]})" if segments is not None else ""
    shares = importance(compared)
    parts = [
        f"<h1>{_text(table.study.name)}</h1>",
        f"<p>{_text(objective.words)}; {higher} is better. {_text(_counts(table))}.</p>",
        f"<h2>History</h2><p>Each trial{where}, and the best so far.</p>{_picture('plot_optimization_history', compared)}",
        "<h2>Importance</h2><p>Share of each key in reaching good results, among the values that were tried.</p>",
        _rows(["key", "share"], [[key, f"{share:.0%}"] for key, share in shares.items()]) if shares else "<p>The results do not tell.</p>",
        f"<h2>Parallel coordinates</h2>{_picture('plot_parallel_coordinate', compared)}",
        f"<h2>Values</h2>{_picture('plot_slice', compared)}",
        f"<h2>Trials</h2>{_trials(table)}",
    ]
    if table.best is not None:
        parts.append("<p>Bold: the best. One run each: compare it by several seeds before you believe it.</p>")
    return "\n".join(parts)
