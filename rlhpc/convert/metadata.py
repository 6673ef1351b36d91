"""Writes the files of a converted folder besides weights: index, config, tokenizer, record, and SHA256SUMS."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.model_files import MANIFEST, RECORD, changed_fields, config_text, model_files, read_fields
from rlhpc.checkpoint.formats.safetensors_headers import DTYPES, INDEX, index_text
from rlhpc.convert.plan import ConversionPlan
from rlhpc.convert.pool import run_tasks
from rlhpc.convert.sources import digest_of
from rlhpc.convert.target import Partial
from rlhpc.core.files import flush, write_atomic

_NAMES = {safe: name for name, safe in DTYPES.items()}


def write_rest(plan: ConversionPlan, partial: Partial) -> None:
    """Writes what the target contains besides weights, the record last."""
    folder = partial.files
    _copy_model_files(plan, folder)
    if plan.target == "megatron":
        from rlhpc.convert.torch_dist_files import write_index

        write_index(plan, folder, [partial.places(output) for output in plan.outputs])
    elif INDEX in plan.small_files:
        (folder / INDEX).write_text(index_text(plan.files), encoding="utf-8")
    sizes = {name: (folder / name).stat().st_size for name in plan.names if name != RECORD}
    digests = {name: digest_of(folder / name) for name in sorted(plan.small_files)}
    record = {**plan.record, "files": dict(sorted(sizes.items())), "sha256": digests}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name in (*plan.small_files, RECORD):
        flush(folder / name)


def new_fields(plan: ConversionPlan) -> dict[str, Any] | None:
    """Fields of config.json if their dtype or quantization changes; None to copy the file."""
    source = plan.source
    counted: Counter[str] = Counter()
    for output in plan.outputs:
        for item in output.items:
            counted[item.dtype] += item.size if not getattr(item, "prefix", "") else 0
    dtype = _NAMES[counted.most_common(1)[0][0]]
    keeps = plan.target == "megatron" and not plan.dtype
    changed = changed_fields(source.fields, source.model_folder, dtype, keeps_dtype=keeps)
    return changed or (dict(source.fields) if source.fields != read_fields(source.model_folder) else None)


def _copy_model_files(plan: ConversionPlan, folder: Path) -> None:
    """Copies config and tokenizer."""
    for file in model_files(plan.source.model_folder):
        shutil.copyfile(file, folder / file.name)
    changed = new_fields(plan)
    if changed is not None:
        (folder / "config.json").write_text(config_text(changed), encoding="utf-8")


_ESCAPES = {"\\": "\\", "n": "\n", "r": "\r"}


def write_manifest(folder: Path, workers: int) -> None:
    """Hashes every file of the folder, the largest first, and writes the list."""
    files = sorted(files_of(folder), key=lambda name: -(folder / name).stat().st_size)
    found = run_tasks(lambda: lambda name: digest_of(folder / name), files, workers)
    digests = {files[index]: digest for index, digest in found}
    text = "".join(_line(name, digests[name]) for name in sorted(files))
    write_atomic(folder / MANIFEST, text.encode(errors="surrogateescape"))


def files_of(folder: Path) -> list[str]:
    """Files in the folder and those below it, except the list itself."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def read_manifest(folder: Path) -> dict[str, str]:
    """SHA-256 by file of a list that ``write_manifest`` or ``sha256sum`` wrote."""
    digests = {}
    for line in (folder / MANIFEST).read_text(encoding="utf-8", errors="surrogateescape").split("\n"):
        if found := re.fullmatch(r"(\\?)([0-9a-f]{64}) [ *](.+)", line):
            name = re.sub(r"\\([\\nr])", lambda escape: _ESCAPES[escape[1]], found[3]) if found[1] else found[3]
            digests[name] = found[2]
    return digests


def _line(name: str, digest: str) -> str:
    """Line as coreutils write it: a backslash in front marks a name with escapes."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"
