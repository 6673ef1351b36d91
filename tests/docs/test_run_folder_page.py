"""docs/run_folder.md has a row for everything that a run writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from tests.docs.pages import DOCS

PAGE = DOCS / "run_folder.md"
RUN = Path("/run")


def rows() -> dict[str, str]:
    """For each file or folder of the page, what bounds its size."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, contents, size = (cell.strip() for cell in line.strip("|").split("|"))
            found |= {name.rstrip("/"): size for name in re.findall(r"`([^`]+)`", names)}
            found |= dict.fromkeys(re.findall(r"`(\w+\.json)`", contents), size)
    return found


def written() -> set[str]:
    """The first folder, or the file, of each path that RunFolder names."""
    folder = RunFolder(RUN)
    named = [getattr(folder, name) for name, kind in vars(RunFolder).items() if isinstance(kind, property)]
    paths = [one if isinstance(one, Path) else one.path for one in named]  # a folder's own paths are inside it
    found = {path.relative_to(RUN).parts[0] for path in paths}
    return found - {"attempts"}


@pytest.mark.parametrize("name", sorted(written()))
def test_what_a_run_writes_has_a_row_with_its_bound(name: str) -> None:
    assert rows().get(name), f"docs/run_folder.md has no row for {name}"


def test_every_row_is_of_something_that_is_written() -> None:
    names = {name.partition("/")[0] for name in rows()} - {"attempts"}
    assert names <= written()
    assert len(names) > 12
