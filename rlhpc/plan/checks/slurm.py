"""Checks of the slurm section: the archive of the ranks' environment, and secrets that others could read."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.redaction import hide, leaves
from rlhpc.core.storage import patiently

KEY = "slurm.environment_archive"
KINDS = {".sqsh": "squashfs", ".sqfs": "squashfs", ".squashfs": "squashfs", ".tar.zst": "tar.zst", ".tzst": "tar.zst",
         ".tar": "tar", ".tar.gz": "tar", ".tgz": "tar"}  # fmt: skip


def archive_kind(archive: Path) -> str:
    """Kind of an archive, by its name. Raises UserError for another one."""
    kind = next((kind for suffix, kind in KINDS.items() if archive.name.endswith(suffix)), None)
    if kind is None:
        remedy = f"use one of {', '.join(KINDS)}"
        raise UserError(f"{str(archive)!r} is no archive by its name", where=KEY, remedy=remedy)
    return kind


def check_archive_file(config: RunConfig) -> None:
    """Raises UserError if the archive is not there."""
    archive = config.slurm.environment_archive
    if archive is not None and not patiently(archive.is_file, archive):
        remedy = "pack it first (docs/slurm.md)"
        raise UserError(f"no such file {str(archive)!r}", where=KEY, remedy=remedy)


def check_environment_archive(config: RunConfig) -> None:
    """Raises UserError for an archive that ranks cannot use, whether it is there or not."""
    if config.slurm.environment_archive is None:
        return
    archive_kind(config.slurm.environment_archive)
    if config.slurm.container is not None:
        remedy = "leave one of both out: an image brings its own Python"
        raise UserError("is not used with slurm.container", where=KEY, remedy=remedy)


# Keys of the slurm section by who reads them.
_COMMAND_LINE = "on srun's command line, which everyone on the nodes can read"
_READERS = {
    "comment": "in the queue, which everyone on the cluster can read",
    "srun_options": _COMMAND_LINE,
    "container": _COMMAND_LINE,
    "sbatch_options": "in the job script, of which Slurm keeps copies",
    "setup": "in the job script, of which Slurm keeps copies",
}


def secret_warnings(config: RunConfig) -> list[str]:
    """Returns one warning for each key with a secret that slurm.environment would hide."""
    slurm = config.slurm.model_dump(mode="json")
    found = []
    for section, where in _READERS.items():
        _, secrets = hide(slurm[section], section)
        for key, _ in leaves(secrets, f"slurm.{section}") if secrets is not None else ():
            found.append(f"{key}: has a secret {where}; put it into slurm.environment")
    return found
