"""DeepSeek-V3's published folder by names, types and shapes: 163 files with true headers and no data (sparse)."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from rlhpc.checkpoint.formats.safetensors_headers import plan_files
from rlhpc.models import shape_of
from rlhpc.sharding.shards import model_tensors
from tests.helpers.published import DEEPSEEK_V3, DEEPSEEK_V3_BF16

# Those of its repository that are kept in bfloat16; the rest of the matrices are fp8.
_BF16 = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "eh_proj.weight", "head.weight")


def tensors() -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor, with scales and the layer that predicts further tokens."""
    shape = shape_of(DEEPSEEK_V3_BF16)
    plain = {tensor.name: tensor.shape for tensor in model_tensors(shape)}
    hidden, vocab = shape.hidden_size, shape.vocab_size
    last = f"model.layers.{shape.num_layers - 1}."
    further = f"model.layers.{shape.num_layers}."
    plain |= {further + name.removeprefix(last): size for name, size in plain.items() if name.startswith(last)}
    plain |= {
        further + "embed_tokens.weight": (vocab, hidden),
        further + "enorm.weight": (hidden,),
        further + "hnorm.weight": (hidden,),
        further + "eh_proj.weight": (hidden, 2 * hidden),
        further + "shared_head.norm.weight": (hidden,),
        further + "shared_head.head.weight": (vocab, hidden),
    }
    found = []
    for name, size in plain.items():
        if name.endswith("e_score_correction_bias"):
            found.append((name, "F32", size))
        elif name.endswith(_BF16):
            found.append((name, "BF16", size))
        else:
            found.append((name, "F8_E4M3", size))
            found.append((name + "_scale_inv", "F32", tuple(-(-n // 128) for n in size)))
    return found


def write(folder: Path) -> int:
    """The folder; returns how many numbers its tensors have, scales left out."""
    folder.mkdir()
    found = tensors()
    files = plan_files(found, 4_300_000_000)
    for file in files:
        with open(folder / file.name, "wb") as out:
            out.write(file.header)
            out.truncate(file.size)
    where = {name: file.name for file in files for name, _, _, _ in file.tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    return sum(prod(size) for name, _, size in found if not name.endswith("_scale_inv"))
