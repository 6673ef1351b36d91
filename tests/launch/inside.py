"""Program of a rank in a container: notes what it sees there."""

from __future__ import annotations

import os
import site
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.core.context import RankContext
from rlhpc.core.files import write_json
from rlhpc.core.imports import import_attribute
from rlhpc.launch.container import config_paths
from rlhpc.plan.checks.user_code import import_paths

HOME = "HOME_OF_THE_USER"  # variable with the home folder on the node


def look(context: RankContext) -> None:
    """Read every file and import every function that the run's configuration names."""
    config = load_config(context.run.config)
    code = {path: import_attribute(path, key).__name__ for key, path in import_paths(config)}
    read = {key: _read(path) for key, path in config_paths(config)}
    home = Path(os.environ[HOME])
    at_home = sorted(os.listdir(home)) if home.exists() else []
    known = {"code": code, "read": read, "home": at_home, "cwd": os.getcwd(), "environ": dict(os.environ)}
    own_home = os.path.isdir(os.environ["HOME"]) and os.access(os.environ["HOME"], os.W_OK)
    write_json(context.run.path / "seen.json", {**known, "user_site": site.ENABLE_USER_SITE, "own_home": own_home})


def _read(path: Path) -> bool:
    """Whether the file, or each file of the folder, can be read."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    try:
        return all(file.read_bytes() is not None for file in files if not file.is_dir()) and bool(files)
    except OSError:
        return False
