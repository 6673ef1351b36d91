"""The pages about Slurm and about shared clusters name what there is."""

from __future__ import annotations

import re

from rlhpc.launch.runs import direct
from tests.docs.pages import DOCS, ROOT, table_names
from tests.slurm.test_shared import KNOWN


def test_every_template_is_on_the_page() -> None:
    tables = table_names(DOCS / "slurm.md")
    assert {file.name for file in (ROOT / "rlhpc" / "sbatch").iterdir()} in map(set, tables)
    assert [names[0] for names in (direct.NODES, direct.RANKS, direct.CPUS, direct.GPUS)] in tables


def test_everything_that_listens_is_on_the_page() -> None:
    """What a test finds on a node beyond these fails it."""
    text = (DOCS / "shared_clusters.md").read_text()
    rows = re.findall(r"^\| ([^|`]+?) \| .* \|$", text, re.MULTILINE)
    assert set(rows) - {"what", "---"} == set(KNOWN)
