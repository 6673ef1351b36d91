"""Trains a tiny copy of every architecture that the proof accepts, at dp_shard 2 x cp 2, beside plain transformers.

    python -m tests.backends.fsdp.architecture_updates [TYPE ...]

TYPE: a model_type; default: those that work by docs/measurements/architectures.json. Prints the largest distances after
three updates and stores them in docs/measurements/architecture_updates.json. Takes minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhpc.core.files import write_atomic
from tests.backends.fsdp.backend_cases import Case, Distance, distance
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.equality import train_reference
from tools.architectures_table import RELEASED, RESULTS, package_versions

FOUND = RESULTS.with_name("architecture_updates.json")
_RANKS = 4
_SECONDS = 300.0  # of an architecture


def beside_transformers(folder: Path, kind: str) -> Distance:
    """Makes a tiny model of the type on the first rank, then trains it on all ranks."""
    import warnings

    import torch.distributed as dist
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    if dist.get_rank() == 0:
        _save_tiny(folder / "start", kind)
        train_reference(folder)
    dist.barrier()
    return distance(folder, Case(kind, cp=2))


def _save_tiny(folder: Path, kind: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING

    from rlhpc.backends.fsdp.probe import random_model, tiny_copy

    torch.manual_seed(0)
    random_model(tiny_copy(CONFIG_MAPPING[kind](**RELEASED.get(kind, {})))).save_pretrained(folder)


def try_kind(kind: str) -> dict[str, Any]:
    """Distances, the largest of all ranks; or the reason why there are none."""
    with tempfile.TemporaryDirectory() as name:
        try:
            ranks = run_ranks(beside_transformers, _RANKS, Path(name), kind, timeout=_SECONDS)
        except RankFailed as error:
            return {"equal": False, "reason": str(error).strip().splitlines()[-1]}
    worst = {key: float(f"{max(asdict(rank)[key] for rank in ranks):.1e}") for key in asdict(ranks[0])}
    return {"equal": all(rank.is_small for rank in ranks), **worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="TYPE")
    kinds = parser.parse_args().kinds
    works = [kind for kind, row in json.loads(RESULTS.read_text())["architectures"].items() if row["works"]]
    found = json.loads(FOUND.read_text())["architectures"] if kinds and FOUND.is_file() else {}
    for kind in kinds or works:
        found[kind] = try_kind(kind)
        print(kind, *(f"{key}={value}" for key, value in found[kind].items()), flush=True)
    stored = {"versions": dict(package_versions()), "architectures": dict(sorted(found.items()))}
    write_atomic(FOUND, json.dumps(stored, indent=1) + "\n")
    equal = sum(row["equal"] for row in found.values())
    print(f"{equal} of {len(found)} equal")
    return int(equal < len(found))


if __name__ == "__main__":
    from tests.backends.fsdp import architecture_updates  # ranks look functions up by their module's name

    sys.exit(architecture_updates.main())
