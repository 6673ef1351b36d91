"""What a machine has, in place of what this one has: device files, a driver, room on its disk, packages."""

from __future__ import annotations

import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.core import env
from rlhpc.launch import machine


def have_gpus(patch: pytest.MonkeyPatch, folder: Path, count: int) -> None:
    """Device files of so many GPUs, all visible, in a folder ``dev`` of ``folder``."""
    devices = folder / "dev"
    shutil.rmtree(devices, ignore_errors=True)
    devices.mkdir()
    for name in (*(f"nvidia{number}" for number in range(count)), "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    patch.setattr(machine, "_DEVICES", devices)
    patch.delenv(env.CUDA_VISIBLE_DEVICES, raising=False)


def have_driver(patch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """A kernel whose file of NVIDIA's driver has this text."""
    file = folder / "driver-version"
    file.write_text(text)
    patch.setattr(machine, "_DRIVER_FILE", file)


def have_free_space(patch: pytest.MonkeyPatch, free: float) -> None:
    """Disks with so many bytes free."""
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def have_packages(patch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Packages that can be found, without content."""
    for name in names:
        (folder / name).mkdir()
    patch.syspath_prepend(folder)


def lack_packages(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Imports without these packages, as if they were not installed."""

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
            return None if name in names else PathFinder.find_spec(name, path, target)

    kept = [finder for finder in sys.meta_path if "__editable__" in repr(finder)]
    patch.setattr(sys, "meta_path", [Finder, *kept])
    for name in names:
        patch.delitem(sys.modules, name, raising=False)
