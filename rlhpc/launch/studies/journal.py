"""Optuna's study of a folder: its journal, repaired before it is opened, its sampler and its pruner.

The journal's own lock outlives a killed process by half a minute, and a line that a killed process or a full disk has
cut breaks every later load as soon as another is appended. The process that has the lock of the folder repairs both.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlhpc.config.study import OptunaClass, StudyFile
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.files import remove
from rlhpc.launch.studies.study_folder import StudyFolder

if TYPE_CHECKING:
    from optuna import Study

INFEASIBLE = "infeasible"  # attribute of a trial: why its settings cannot work
FEASIBLE = "feasible"  # name of the constraint, set once: 1 for settings that cannot work, from which samplers learn


def check_optuna() -> None:
    """Raises UserError without Optuna."""
    if find_spec("optuna") is None:
        raise UserError("needs optuna", where="study", remedy="pip install 'rlhpc[study]'")


def open_study(folder: StudyFolder, study: StudyFile) -> Study:
    """The Optuna study of a folder, whose lock this process has. Raises UserError for a sampler or pruner that Optuna
    does not have, or that does not take its arguments."""
    check_optuna()
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    repair(folder)
    backend = JournalFileBackend(str(folder.journal), lock_obj=JournalFileOpenLock(str(folder.journal)))
    found = optuna.create_study(
        storage=JournalStorage(backend),
        pruner=_made(optuna.pruners, "pruner", study.pruner, {}),
        study_name=study.name,
        direction=study.objective.goal,
        load_if_exists=True,
    )
    found.sampler = make_sampler(study, len(found.get_trials(deepcopy=False)))
    return found


def repair(folder: StudyFolder) -> None:
    """Removes a lock that a killed process left, and the end of a line that was cut."""
    remove(folder.journal.with_name(f"{folder.journal.name}.lock"))
    if not folder.journal.is_file():
        return
    with folder.journal.open("r+b") as file:
        lines = file.read()
        if not lines.endswith(b"\n"):
            file.truncate(lines.rfind(b"\n") + 1)


def make_sampler(study: StudyFile, count: int = 0) -> Any:
    """The sampler. Its seed depends on the number of trials so far: each advance makes another sampler, and with the
    same seed all would suggest the same. Grids and quasi-random sequences have one seed: their places are in the
    journal."""
    import optuna

    one = study.sampler.name in ("GridSampler", "QMCSampler")
    seed = study.seed if one else (study.seed << 20) + count
    defaults: dict[str, Any] = {"seed": seed % (1 << 32)}
    if any(parameter.when for parameter in study.space.values()):
        defaults |= {"multivariate": True, "group": True}
    if study.sampler.name == "GridSampler":
        defaults["search_space"] = _grid(study)
    return _made(optuna.samplers, "sampler", study.sampler, defaults)


def grid_size(study: StudyFile) -> int | None:
    """Number of cells of the grid that is searched; None for another sampler."""
    return math.prod(map(len, _grid(study).values())) if study.sampler.name == "GridSampler" else None


def _grid(study: StudyFile) -> dict[str, Sequence[Any]]:
    """Values of each key for a search of a whole grid."""
    found: dict[str, Sequence[Any]] = {}
    for key, parameter in study.space.items():
        if parameter.choices is not None:
            found[key] = parameter.choices
        elif isinstance(parameter.low, int) and isinstance(parameter.high, int):
            found[key] = range(parameter.low, parameter.high + 1, int(parameter.step or 1))
        else:
            raise UserError(
                "has no values for a grid", where=f"space.{key}", remedy="give choices, or use another sampler"
            )
    return found


def _made(module: Any, kind: str, asked: OptunaClass, defaults: Mapping[str, Any]) -> Any:
    """An object of one of Optuna's classes, with those of the defaults that it takes."""
    names = [name for name in vars(module) if name.endswith(kind.capitalize()) and not name.startswith("Base")]
    if asked.name not in names:
        raise UserError(
            f"Optuna has no {kind} {asked.name!r}", where=f"{kind}.name", remedy=did_you_mean(asked.name, names)
        )
    cls: Callable[..., Any] = getattr(module, asked.name)
    accepted = inspect.signature(cls).parameters
    arguments = {**{name: value for name, value in defaults.items() if name in accepted}, **asked.arguments}
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{asked.name}: {error}", where=f"{kind}.arguments", remedy="correct them") from None
