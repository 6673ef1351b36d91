"""Conversions by a former commit and by this checkout: the same bytes of HuggingFace's files, and of every tensor of
Megatron's.

    python -m tests.convert.compare_commits COMMIT                    # nine families through twenty layouts
    python -m tests.convert.compare_commits COMMIT --kinds qwen3 dsv3 --layouts 3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.formats.arrays import NUMPY
from rlhpc.checkpoint.formats.torch_chunks import ChunkReader
from rlhpc.checkpoint.formats.torch_dist_metadata import SavedTensor, read_index
from rlhpc.sharding.shards import Box

ROOT = Path(__file__).parents[2]
# Runs in either tree: SRC, folder for the results, and layouts as JSON.
_CONVERT = """
import json, sys
from pathlib import Path
from tests.convert.helpers import to_huggingface, to_megatron
source, folder = map(Path, sys.argv[1:3])
for number, axes in enumerate(json.loads(sys.argv[3])):
    there = to_megatron(source, folder / f"{number}-megatron", **axes)
    to_huggingface(there, folder / f"{number}-hf", file_bytes=[200_000, 5 * 10**9][number % 2])
"""


def main() -> int:
    from tests.convert.test_round_trip import twenty
    from tests.helpers.tiny_models import KINDS, make_model

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--layouts", type=int, default=20, help="per family")
    asked = parser.parse_args()
    tensors = files = 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        here, former = Path(name), Path(name, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(former), asked.commit], check=True)
        try:
            for kind in asked.kinds:
                model = make_model(here / kind / "source", kind, num_hidden_layers=8, vocab_size=67)
                layouts = json.dumps(twenty(model)[: asked.layouts])
                results = [here / kind / "former", here / kind / "now"]
                for tree, folder in zip((former, ROOT), results, strict=True):
                    command = [sys.executable, "-c", _CONVERT, str(model), str(folder), layouts]
                    subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
                for folder in sorted(results[0].iterdir()):
                    counts, found = compare(folder, results[1] / folder.name)
                    tensors, files = tensors + counts[0], files + counts[1]
                    wrong += [f"{kind} {folder.name}: {text}" for text in found]
                print(f"{kind}: {len(wrong)} differences so far", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(former)], check=True)
    print("\n".join([*wrong[:20], f"{files} files of HuggingFace's and {tensors} tensors of Megatron's compared"]))
    return bool(wrong)


def compare(one: Path, other: Path) -> tuple[tuple[int, int], list[str]]:
    """Numbers of tensors of Megatron's and of HuggingFace's files compared, and the names of those that differ."""
    checkpoint = (one / "release").is_dir()
    if checkpoint:
        return _compare_megatron(one / "release", other / "release")
    names = sorted(path.name for path in one.iterdir() if path.name != "conversion.json")
    missing = {path.name for path in other.iterdir()} ^ {*names, "conversion.json"}
    return (0, len(names)), [*missing, *(n for n in names if (one / n).read_bytes() != (other / n).read_bytes())]


def _compare_megatron(one: Path, other: Path) -> tuple[tuple[int, int], list[str]]:
    first, second = read_index(one), read_index(other)
    wrong = sorted({*first.objects} ^ {*second.objects} | {*first.tensors} ^ {*second.tensors})
    both = sorted(first.tensors.keys() & second.tensors.keys())
    for key in both:
        a, b = first.tensors[key], second.tensors[key]
        boxes = [{(chunk.box.start, chunk.box.stop) for chunk in saved.chunks} for saved in (a, b)]
        if a.dtype != b.dtype or boxes[0] != boxes[1] or not np.array_equal(_elements(one, a), _elements(other, b)):
            wrong.append(key)
    return (len(both), 0), wrong


def digest(folder: Path) -> str:
    """SHA-256 of a converted folder's tensors of Megatron's, or files of HuggingFace's."""
    found = hashlib.sha256()
    if (folder / "release").is_dir():
        for key, saved in sorted(read_index(folder / "release").tensors.items()):
            found.update(f"{key} {saved.dtype} {saved.shape}".encode())
            found.update(_elements(folder / "release", saved))
    else:
        for path in sorted(folder.glob("model*")):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def _elements(folder: Path, saved: SavedTensor) -> Any:
    """Bits of a tensor."""
    out = np.empty(saved.shape, NUMPY[saved.dtype])
    ChunkReader(folder, {saved.key: saved}).into(out, saved.key, Box((0,) * len(saved.shape), saved.shape), saved.dtype)
    return out.reshape(-1).view(np.uint8)


if __name__ == "__main__":
    sys.exit(main())
