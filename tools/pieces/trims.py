"""Files of a wheel that a given use does not need, to reduce the bytes to transfer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from rlhpc.core.errors import UserError, did_you_mean

# Files that a use does not need, from vLLM 0.25.0: each of these kernels is imported with ImportError suppressed, and
# headers are read only when a kernel is compiled at run time.
USES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        # FlashAttention 2 (Hopper uses 3) and kernels for Blackwell
        "hopper": ("vllm/vllm_flash_attn/_vllm_fa2_C*.so", "vllm/_qutlass_C*.so", "vllm/third_party/fmha_sm100/*"),
        "offline": ("vllm/vllm-rs",),  # the server's front end
        "bf16": ("vllm/third_party/deep_gemm/include/*",),  # headers of DeepGEMM, which multiplies in FP8
        "dense": ("vllm/_moe_C*.so",),  # routing and grouped products of mixture-of-experts models
    }
}


@dataclass(frozen=True)
class Trim:
    """Wheel to trim, with globs of the files to omit. Each glob must match."""

    name: str  # canonical
    globs: tuple[str, ...]
    text: str


def parse_trims(texts: Iterable[str]) -> list[Trim]:
    """Trims from ``NAME:USE,USE`` or ``NAME:GLOB,GLOB``. Those of one wheel are merged."""
    trims: dict[str, Trim] = {}
    for text in texts:
        name, _, wanted = text.partition(":")
        name = canonicalize_name(name.strip())
        words = [word.strip() for word in wanted.split(",") if word.strip()]
        if not name or not words:
            raise UserError(f"{text!r} names no files", where="--trim", remedy="write vllm:hopper or NAME:GLOB")
        globs = [glob for word in words for glob in _globs(name, word)]
        before = trims.get(name, Trim(name, (), ""))
        trims[name] = Trim(name, (*before.globs, *globs), " ".join(filter(None, (before.text, text))))
    return list(trims.values())


def _globs(name: str, word: str) -> tuple[str, ...]:
    uses = USES.get(name, {})
    if word in uses:
        return uses[word]
    if not any(sign in word for sign in "*?[/."):
        raise UserError(f"unknown use of {name}: {word!r}", where="--trim", remedy=did_you_mean(word, uses))
    return (word,)
