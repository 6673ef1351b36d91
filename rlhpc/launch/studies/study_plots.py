"""Optuna's pictures of a study: its history, the objective by step, each key, and the keys' importance."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

from rlhpc.core.errors import UserError
from rlhpc.core.files import make_folder
from rlhpc.launch.studies.journal import open_study
from rlhpc.launch.studies.study_folder import StudyFolder, read_study

_FEWEST, _FEWEST_FOR_IMPORTANCE = 2, 8  # complete trials
_IMPORTANCE = "param_importances"  # by PED-ANOVA (Watanabe et al. 2023)
_PICTURES = ("optimization_history", "intermediate_values", "slice", "parallel_coordinate", _IMPORTANCE)


def plot_study(folder: StudyFolder, target: Path) -> list[Path]:
    """Draws the pictures into a folder. Raises UserError before two trials are complete, or without matplotlib."""
    study = read_study(folder)
    if find_spec("matplotlib") is None:
        raise UserError("needs matplotlib", where="study plot", remedy="pip install 'rlhpc[study]'")
    import matplotlib
    from optuna.visualization import matplotlib as plots

    files = []
    with folder.locked(), matplotlib.rc_context(), warnings.catch_warnings():  # Optuna sets a style
        found = open_study(folder, study)
        count = sum(trial.state.name == "COMPLETE" for trial in found.get_trials(deepcopy=False))
        if count < _FEWEST:
            raise UserError(
                f"{count} complete trial(s), but pictures need {_FEWEST}",
                where=str(folder.path),
                remedy="see `rlhpc study status`",
            )
        warnings.simplefilter("ignore")  # a key with one value
        matplotlib.use("agg")
        from matplotlib import pyplot

        make_folder(target)
        for name in _PICTURES if count >= _FEWEST_FOR_IMPORTANCE else _PICTURES[:-1]:
            named = {} if name in ("intermediate_values", _IMPORTANCE) else {"target_name": study.objective.metric}
            getattr(plots, f"plot_{name}")(found, **named)
            files.append(target / f"{name}.png")
            pyplot.gcf().set_size_inches(9.0, 4.5)
            pyplot.savefig(files[-1], bbox_inches="tight")
            pyplot.close()
    return files
