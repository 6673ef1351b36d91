"""Which releases of megatron-core, specs, families and layouts exchange checkpoints with ``rlhpc convert``.

    python -m tests.convert.megatron_releases                         # the installed release
    python -m tests.convert.megatron_releases --tree FOLDER            # another one, unpacked in FOLDER

For each family, four ranks of that release build their own model by their own spec, load what was converted, compute
logits and save it again in another layout; that is converted back and compared bit by bit. Prints a table; exits with 1
if any case fails. Models are those of tests/convert/test_megatron_core.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from tests.convert.helpers import differing, to_huggingface, to_megatron
from tests.convert.test_megatron_core import CASES, LATENT, MORE, PeerCase
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.equality import Case
from tests.helpers.tiny_models import make_model

_RANKS = 4


def exchange(here: Path, case: PeerCase) -> tuple[str, float]:
    """On each rank: the release, and the largest difference of logits."""
    import megatron.core
    import torch
    from transformers import AutoModelForCausalLM

    from rlhpc.checkpoint.formats.described import describe_model
    from rlhpc.parallel.groups import build_groups
    from rlhpc.sharding.layout import ParallelLayout
    from tests.convert.megatron_peer import (
        build_peer,
        copy_to_local,
        load_as_megatron_lm,
        logits_of,
        save_as_megatron_lm,
        spoil,
    )

    shape: Any = describe_model(here / "hf")
    model = AutoModelForCausalLM.from_pretrained(here / "hf", dtype=torch.float32, attn_implementation="eager")
    tokens = torch.arange(24) * 7 % shape.vocab_size
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]

    def peer_of(case: Case, spec: str) -> Any:
        layout = ParallelLayout(_RANKS, tp=case.tp, pp=case.pp, ep=case.ep, etp=case.etp)
        build_groups(layout, seed=0)
        return build_peer(shape, layout, spec, model.model.rotary_emb.inv_freq)

    peer = peer_of(case.load, "te")
    spoil(peer)
    load_as_megatron_lm(peer, here / "megatron")
    apart = float((logits_of(peer, tokens)[:, : shape.vocab_size] - expected).abs().max())
    peer = peer_of(case.save, "te")
    load_as_megatron_lm(peer, here / "megatron")
    if case.spec == "local":
        loaded, peer = peer, peer_of(case.save, "local")
        copy_to_local(loaded, peer)
    save_as_megatron_lm(peer, here / "theirs", 350, per_layer=case.per_layer)
    return megatron.core.__version__, apart


def try_case(case: PeerCase) -> tuple[str, str]:
    """The release and what came of the case."""
    with tempfile.TemporaryDirectory(prefix="releases-") as name:
        here = Path(name)
        changes = LATENT if case.kind.startswith("dsv3") else {}
        to_megatron(
            make_model(here / "hf", case.kind, num_hidden_layers=4, vocab_size=67, **changes),
            here / "megatron",
            **case.cut,
        )
        from tests.convert.megatron_releases import exchange as of_module  # this file may be __main__, which ranks lack

        try:
            release, apart = run_ranks(of_module, _RANKS, here, case, fresh=True, timeout=300)[0]
        except RankFailed as error:
            lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
            return "", f"failed: {lines[-1][:100] if lines else 'no message'}"
        try:
            back = to_huggingface(here / "theirs", here / "back", model=here / "hf")
        except UserError as error:
            return release, f"logits {apart:.1e}, not read back: {error.message}"
        different = differing(here / "hf", back)
    return release, f"logits {apart:.1e}, " + ("bits differ" if different else "back bit for bit")


def _axes(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "1 rank"


def _case_axes(case: Case) -> str:
    return _axes({axis: getattr(case, axis) or 1 for axis in ("tp", "pp", "ep", "etp")})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="folder that contains the package megatron")
    parser.add_argument("--kinds", help="families to try, by comma; default: all")
    options = parser.parse_args()
    if options.tree is not None:
        path = os.pathsep.join([str(options.tree.resolve()), os.environ.get("PYTHONPATH", str(Path.cwd()))])
        kinds = ["--kinds", options.kinds] if options.kinds else []
        command = [sys.executable, "-m", "tests.convert.megatron_releases", *kinds]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    failed = False
    print("release   family       names  form     cut            loaded in  saved in    result")
    for case in (*CASES, *MORE):
        if options.kinds and case.kind not in options.kinds.split(","):
            continue
        release, result = try_case(case)
        failed |= "bit for bit" not in result or float(result.split()[1].rstrip(",")) >= 1e-5
        form = "single" if case.per_layer else "default"
        print(
            f"{release:8}  {case.kind:11}  {case.spec:5}  {form:7}  {_axes(case.cut):13}  {_case_axes(case.load):9}  "
            f"{_case_axes(case.save):10}  {result}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
