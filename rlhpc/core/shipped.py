"""Files that the package ships beside its code: ``configs/`` and ``sbatch/``."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def shipped(name: str) -> Path:
    """Path of a file or folder of the installed package, for example ``configs/demo.yaml``."""
    return Path(str(resources.files("rlhpc") / name))
