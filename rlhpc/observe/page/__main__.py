"""Writes report/report.html of a run folder, at the lowest priority: ``python -m rlhpc.observe.page RUN_FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import BRIEF, use
from rlhpc.observe.page.document import write_own_page

if __name__ == "__main__":
    os.nice(19)
    use(BRIEF)
    write_own_page(RunFolder(Path(sys.argv[1])))
