"""``rlhpc eval``: a run without steps on the weights of any model or checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from rlhpc.config.schema import RunConfig
from rlhpc.convert.sides import Step, read_side
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.run_registry import find_run

FOLDER = "eval"


def evaluation_of(
    config: RunConfig,
    model: Path | None = None,
    run: str | None = None,
    step: Step | None = None,
    name: str | None = None,
) -> RunConfig:
    """``config`` as a run that answers its held-out prompts once.

    Weights are those of ``model`` (a HuggingFace folder or a checkpoint), of a checkpoint of ``run`` (that
    of ``step``, by default the newest), or the config's own. Results go to eval/NAME of the run's folder, or of the
    working folder.
    """
    if model is not None and run is not None:
        raise UserError("excludes --run", where="--model", remedy="leave out one of them")
    if step is not None and run is None:
        raise UserError("applies to checkpoints of a run", where="--step", remedy="add --run")
    if not config.data.validation:
        raise UserError("no held-out prompts", where="data.validation", remedy="name at least one file")
    base, source = Path(), model
    if run is not None:
        base = source = find_run(run).folder.path
    section, title = config.model, config.name
    if source is not None:
        side = read_side(source, step, family=section.family, any_family=True)
        weights = side.home if side.home != side.model_folder else None
        section = section.model_copy(update={"path": side.model_folder, "weights": weights})
        title = side.home.parent.name if run is not None else source.name
    elif section.weights is not None:
        title = section.weights.parent.name
    title = re.sub(r"[^\w.-]", "_", name or title)
    return config.model_copy(
        update={
            "name": f"eval-{title}",
            "run_dir": base / FOLDER / title,
            "model": section,
            "sft": None,
            "data": config.data.model_copy(update={"train": []}),
            "train": config.train.model_copy(update={"steps": 0}),
        }
    )
