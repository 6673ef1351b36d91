"""Facts that are attached to a tracker's run: packages, machine, git state of the user's code, environment.

They are recorded in the run folder beside the ranks: what is sent afterwards has those of the run, and not of the
machine that sends it. All of it goes through rlhpc.core.redaction.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import hide, leaves
from rlhpc.core.storage import exists

_GIT_SECONDS = 20.0
_MOST_CHANGED = 200  # names of changed files
_LARGEST_FILE = 32 * 2**20


def record_facts(folder: RunFolder, workdir: Path) -> None:
    """Writes the facts of this machine and of the repository around ``workdir``."""
    facts = {
        "packages": dict(sorted({found.name: found.version for found in distributions()}.items())),
        "machine": _machine(),
        "code": _git(workdir),
        "environment": recorded_environment(os.environ),
    }
    write_json(folder.trackers.facts, hide(facts)[0])


def attachments(folder: RunFolder, config: RunConfig) -> tuple[dict[str, str], list[Path]]:
    """Keys of the configuration with their values, and the files to attach that are there by now."""
    shown = hide(config.model_dump(mode="json"))[0]
    settings = {key: "null" if value is None else str(value) for key, value in leaves(shown)}
    files = [folder.config, folder.trackers.facts]
    if exists(folder.report):
        files += sorted(folder.report.iterdir())
    return settings, [file for file in files if file.is_file() and file.stat().st_size <= _LARGEST_FILE]


def recorded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the allow-list, without secrets."""
    names = sorted(name for name in environ if name in env.RECORDED or name.startswith(env.RECORDED_PREFIXES))
    shown: dict[str, str] = hide({name: environ[name] for name in names})[0]
    return shown


def _machine() -> dict[str, Any]:
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [line.partition(":")[2].strip() for file in gpus for line in _lines(file) if line.startswith("Model:")]
    memory = next((line.split()[1] for line in _lines(Path("/proc/meminfo")) if line.startswith("MemTotal:")), "0")
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "gpus": models,
        "driver": next(iter(_lines(Path("/proc/driver/nvidia/version"))), ""),
    }


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _git(workdir: Path) -> dict[str, Any]:
    """Commit and changed files of the repository around a folder; empty without a repository."""
    commit = _run_git(workdir, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _run_git(workdir, "status", "--porcelain").splitlines()
    return {
        "commit": commit,
        "branch": _run_git(workdir, "rev-parse", "--abbrev-ref", "HEAD"),
        "remote": _run_git(workdir, "config", "--get", "remote.origin.url"),
        "folder": str(workdir),
        "dirty": bool(changed),
        "changed": changed[:_MOST_CHANGED],
    }


def _run_git(workdir: Path, *arguments: str) -> str:
    """Output of git; empty if it fails or takes too long."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(workdir), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
