"""Runs in processes that cannot import Megatron-core, as on a machine without it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.runs import ROOT, finish, start

# Of every process that starts afresh: its command is noted, and each attempt to find or import Megatron, which fails.
_SITE = """
import importlib.abc, sys

def note(text):
    with open({file!r}, "a") as file:
        file.write(text + "\\n")

class WithoutMegatron(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            note("megatron")
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, WithoutMegatron())
note(" ".join(sys.orig_argv))
"""


def run_without_megatron(config: Path, *options: str) -> None:
    """Runs to the end in new processes: a warm one has imported Megatron. None of them may look for it."""
    site = config.parent / "site"
    site.mkdir(exist_ok=True)
    notes = site / "notes"
    notes.unlink(missing_ok=True)
    (site / "sitecustomize.py").write_text(_SITE.format(file=str(notes)))
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm.INTERPRETER)
        code, output = finish(start(config, *options, environ={"PYTHONPATH": path}))
    assert code == 0, output
    found = notes.read_text().splitlines()
    assert any("rlhpc.cli.main" in note for note in found), found
    assert any("rlhpc.launch.worker.main" in note for note in found), "a rank"
    assert "megatron" not in found
