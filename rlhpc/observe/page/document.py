"""Writes the page of runs: one HTML document of data, scripts and styles, without requests."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import BRIEF
from rlhpc.observe.page.collect import page_data
from rlhpc.observe.page.numbers import pack_texts

# SHA-256 of the files of uPlot 1.6.32's npm package, whose integrity is
# sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==
UPLOT = {
    "uplot/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot/LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
STYLES = ("uplot/uPlot.min.css", "page.css")
SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "base.js",
    "curves.js",
    "distributions.js",
    "timeline.js",
    "events.js",
    "placement.js",
    "samples.js",
    "tables.js",
    "main.js",
)
_DATA = "application/octet-stream"
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rlhpc</title>
{styles}
</head>
<body>
<noscript>This page needs JavaScript. It makes no request.</noscript>
<script type="{kind}" id="texts">{texts}</script>
<script type="{kind}" id="numbers">{numbers}</script>
{scripts}
</body>
</html>
"""


def document(texts: str, numbers: str) -> str:
    """The page. ``texts`` and ``numbers`` are packed: base64 has no character that is markup."""
    styles, scripts = [_asset(name) for name in STYLES], [_asset(name) for name in SCRIPTS]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(scripts)}",
            f"style-src {_hashes(styles)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    return _PAGE.format(
        policy=policy,
        styles="\n".join(f"<style>{text}</style>" for text in styles),
        kind=_DATA,
        texts=texts,
        numbers=numbers,
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


def checksum(name: str) -> str:
    """SHA-256 of a file in ``assets``."""
    return hashlib.sha256(_bytes(name)).hexdigest()


def _asset(name: str) -> str:
    """A script or style. Raises ValueError for a file of uPlot that is not the released one."""
    if UPLOT.get(name, checksum(name)) != checksum(name):
        raise ValueError(f"{name} differs from uPlot 1.6.32: install rlhpc again")
    return _bytes(name).decode("utf-8")


def _bytes(name: str) -> bytes:
    return resources.files("rlhpc.observe.page").joinpath("assets", *name.split("/")).read_bytes()


def _hashes(texts: list[str]) -> str:
    sums = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in sums)


def write_page(folders: Sequence[RunFolder], file: Path, *, training: bool = True) -> None:
    """Writes the page of one or several runs atomically. Its folder must exist. ``training``: with the samples of
    training steps, whose files take a second to read."""
    texts, numbers = page_data(folders, file.absolute().parent, training=training)
    write_atomic(file, document(pack_texts(texts), numbers.packed()), BRIEF)


def write_own_page(folder: RunFolder, *, training: bool = True) -> None:
    """Writes a run's page into its folder: report/report.html."""
    folder.report.mkdir(exist_ok=True)
    write_page([folder], folder.page, training=training)
