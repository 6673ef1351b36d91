"""Writes the page of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import BRIEF
from rlhpc.observe.page.collect import page_data
from rlhpc.observe.page.document import document
from rlhpc.observe.page.packing import pack_texts


def write_page(folders: Sequence[RunFolder], file: Path, *, training: bool = True) -> None:
    """Writes the page of one or several runs atomically. Its folder must exist. ``training``: with the samples of
    training steps, whose files take a second to read."""
    texts, numbers = page_data(folders, file.absolute().parent, training=training)
    write_atomic(file, document(pack_texts(texts), numbers.packed()), BRIEF)


def write_own_page(folder: RunFolder, *, training: bool = True) -> None:
    """Writes a run's page into its folder: report/report.html."""
    folder.report.mkdir(exist_ok=True)
    write_page([folder], folder.page, training=training)
