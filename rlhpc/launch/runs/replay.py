"""``rlhpc replay``: finds the update and the weights, and starts the ranks on this machine."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.files import read_json
from rlhpc.core.folder import RunFolder, SkippedUpdate
from rlhpc.launch.machine import check_packages, gpu_count
from rlhpc.launch.runs.run_registry import find_run
from rlhpc.launch.supervise.local import run_local

PROGRAM = "rlhpc.trainer.main:replay_rank"


def replay_here(config: RunConfig) -> int:
    """Replays a skipped update (``replay_of``) with ranks on this machine; returns the exit code."""
    gpus, ranks = gpu_count(), config.resources.ranks_per_node
    if 0 < gpus < ranks:
        raise UserError(
            f"the update was computed by {ranks} ranks, but this machine has {gpus} GPU(s)",
            where=str(config.folder.parent),
            remedy=f"replay it on a machine with as many, or set {env.CUDA_VISIBLE_DEVICES}= to use the CPU",
        )
    check_packages(config)
    return run_local(config, RunFolder(config.folder), entry=PROGRAM)


def replay_of(run: str, name: str | None = None, step: int | None = None) -> RunConfig:
    """Configuration of a replay: that of the attempt that skipped the update, with as many ranks on one machine.

    ``run``: folder, name or job id; ``name``: the update's folder, by default the newest; ``step``: checkpoint of the
    weights, by default the newest, or the run's initial weights without any.
    """
    folder = find_run(run).folder
    update = _find_update(folder, name)
    record = read_json(update.record)
    config = load_config(folder.attempt(record["attempt"]).config)
    weights = _find_weights(folder, step) or config.model.weights
    return config.model_copy(
        update={
            "name": f"replay-{update.path.name}",
            "run_dir": update.replay,
            "prepare": None,
            "placement": "colocated",  # the ranks that train repeat the update
            "model": config.model.model_copy(update={"weights": weights}),
            "slurm": config.slurm.model_copy(update={"nodes": 1}),
            "resources": config.resources.model_copy(update={"ranks_per_node": record["world_size"]}),
        }
    )


def _find_update(run: RunFolder, name: str | None) -> SkippedUpdate:
    there = {file.parent.name: file.parent for file in run.skipped_updates.glob("[!.]*/update.json")}
    if not there:
        raise UserError("no skipped updates", where=str(run.path), remedy="replay a run whose log reports one")
    if name is None:
        return SkippedUpdate(max(there.values(), key=lambda path: (path / "update.json").stat().st_mtime))
    wanted = Path(name).name
    if wanted not in there:
        raise UserError(f"no skipped update {name!r}", where=str(run.path), remedy=did_you_mean(wanted, there))
    return SkippedUpdate(there[wanted])


def _find_weights(run: RunFolder, step: int | None) -> Path | None:
    """Folder of the actor in the checkpoint of ``step``, by default the newest; None without any."""
    steps = sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))
    if step is None and not steps:
        return None
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise UserError(f"no checkpoint of step {step}", where="--step", remedy=f"choose one of: {known}")
    return run.checkpoints / f"step-{step if step is not None else steps[-1]:08d}" / "actor"
