"""Bytes that a forward pass of transformers' own modules stores for its backward pass.

Every operation is one of PyTorch's, of which autograd stores inputs or outputs; nothing is fused but attention and the
head. Known families are counted operation by operation, and compared with real forward passes
(tests/helpers/fsdp_memory.py). Any other architecture has figures that were measured, or a bound.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from math import lcm
from pathlib import Path
from typing import Any

from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_json
from rlhpc.models import ModelDescription, ModelShape, read_config
from rlhpc.plan.estimates.activations import LOG_PROB_BYTES, Kernels, head_bytes
from rlhpc.plan.estimates.rank_memory import ITEMSIZE
from rlhpc.sharding.layout import choose_context_method

_FORMAT = 1
_PACKAGES = ("torch", "transformers")
# Fields of a config.json that change no module.
_IRRELEVANT = frozenset(("_name_or_path", "torch_dtype", "dtype", "transformers_version", "architectures", "use_cache"))


@dataclass(frozen=True)
class MeasuredActivations:
    """Bytes per token on one rank, of all layers together except ``largest_layer``; ``constant``: of any number of
    tokens, per layer. With fused attention.

    ``queries``, ``keys_values``, ``outputs``, ``sums``: of attention's kernels. ``mlp``, ``moe``, ``shared_experts``:
    what recomputation of these parts saves.
    """

    layers: float
    outside: float
    largest_layer: float
    constant: float
    queries: float
    keys_values: float
    outputs: float
    sums: float
    mlp: float = 0.0
    moe: float = 0.0
    shared_experts: float = 0.0

    @classmethod
    def from_json(cls, value: Any) -> MeasuredActivations:
        """Inverse of ``asdict``. Raises ValueError for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or value.keys() != names:
            raise ValueError("not measured activations")
        if not all(isinstance(number, int | float) and 0 <= number < 1e12 for number in value.values()):
            raise ValueError("not measured activations")
        return cls(**value)


def find_measured(folder: Path, dtype: str) -> MeasuredActivations | None:
    """Returns what was measured of the model in ``folder`` with the installed versions; with any where they are not
    installed. None without."""
    try:
        file = _file(folder, dtype)
        status = file.stat()
        return _read(file, (status.st_mtime_ns, status.st_size))
    except (OSError, UserError):
        return None


@lru_cache(maxsize=16)
def _read(file: Path, stamp: object) -> MeasuredActivations | None:
    """Cached, because a search asks for it with each layout; ``stamp`` changes with the file."""
    try:
        found, installed = json.loads(file.read_text(encoding="utf-8")), package_versions()
        if found["format"] != _FORMAT or (installed and found["versions"] != installed):
            return None
        return MeasuredActivations.from_json(found["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_measured(folder: Path, dtype: str, measured: MeasuredActivations) -> Path:
    """Keeps it in the cache; returns the file. Raises OSError."""
    file = _file(folder, dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"format": _FORMAT, "versions": package_versions(), "measured": asdict(measured)})
    return file


def package_versions() -> dict[str, str]:
    """Versions of the packages that compute; empty where one is not installed."""
    try:
        return {name: version(name) for name in _PACKAGES}
    except PackageNotFoundError:
        return {}


def _file(folder: Path, dtype: str) -> Path:
    base = os.environ.get(env.XDG_CACHE_HOME) or ""
    cache = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    return cache / "rlhpc" / "activations" / f"{_digest(read_config(folder))}-{dtype}.json"


def _digest(config: Mapping[str, Any]) -> str:
    relevant = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:24]


_FLOAT32, _INT64, _INT32 = 4, 8, 4
_ROTATIONS = 2  # of an unknown architecture: its kinds of attention may have angles of their own
_PARTS = ("mlp", "moe", "shared_experts")


@dataclass(frozen=True)
class FsdpSetting:
    """Everything but tokens that activations depend on. ``measured``: of an architecture that no family describes;
    None: it has a bound."""

    shape: ModelDescription
    cp: int
    parallel: ParallelSection
    memory: MemorySection
    dtype: str
    kernels: Kernels = "fused"
    measured: MeasuredActivations | None = None

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def exchange(self) -> str | None:
        """Exchange by which attention sees whole sequences over several context-parallel ranks."""
        if self.cp == 1:
            return None
        requested = None if self.parallel.cp_method == "auto" else self.parallel.cp_method
        return choose_context_method(self.shape.num_heads, self.kv_heads, self.cp, requested).method

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values in attention's kernel."""
        return self.shape.num_kv_heads if self.shape.latent is None else self.shape.num_heads

    def recomputes(self, module: str) -> bool:
        return self.memory.recompute == "selective" and module in self.memory.recompute_modules


@dataclass(frozen=True)
class StoredBytes:
    """Activations of one microbatch. ``recomputed``: of a layer, or a part of one, during its recomputation."""

    layers: int
    outside: int  # embedding, rotary angles, final norm and head
    recomputed: int
    away: int = 0  # in CPU memory

    @property
    def total(self) -> int:
        return self.layers + self.outside


def stored_activations(setting: FsdpSetting, tokens: int) -> StoredBytes:
    """Returns the activations of a microbatch of ``tokens`` on a rank; all of them count as trained on."""
    found = _stored(setting, tokens)
    if setting.memory.recompute != "full" or not setting.memory.offload_activations:
        return found
    # Two layers' inputs are on the GPU too: on their way to CPU memory or back.
    moving = min(2, setting.shape.num_layers) * layer_input(setting, tokens)
    return replace(found, layers=moving, away=found.layers)


def _stored(setting: FsdpSetting, tokens: int) -> StoredBytes:
    if setting.measured is not None:
        return _measured(setting, setting.measured, tokens)
    shape = setting.shape
    sparse = len(shape.experts.layers) if shape.experts else 0
    counts = {False: shape.num_layers - sparse, True: sparse}
    kinds = [kind for kind, count in counts.items() if count]
    stored = {kind: layer_activations(setting, tokens, has_experts=kind) for kind in kinds}
    whole = {kind: _layer(setting, tokens, has_experts=kind, recompute=False) for kind in kinds}
    again = 0
    if setting.memory.recompute == "full":
        again = max(whole.values())
    elif setting.memory.recompute == "selective":
        again = max(whole[kind] - stored[kind] for kind in kinds)
    layers = sum(counts[kind] * stored[kind] for kind in kinds)
    return StoredBytes(layers, outside_activations(setting, tokens), again)


def _measured(setting: FsdpSetting, measured: MeasuredActivations, tokens: int) -> StoredBytes:
    """Returns what was measured, changed by the exchange of context-parallel ranks and recomputation."""
    count, memory = setting.shape.num_layers, setting.memory
    constant = round(measured.constant)
    whole = measured.layers
    if setting.exchange == "ulysses":
        copies = lcm(setting.kv_heads, setting.cp) / setting.kv_heads
        whole += (copies - 1) * measured.keys_values + measured.outputs
    elif setting.exchange == "all_gather":
        whole += (setting.cp - 0.5) * measured.keys_values + measured.outputs
    if setting.kernels == "padded":
        whole += measured.outputs * (1 if setting.exchange or setting.shape.latent else 2)
    outside = round(tokens * measured.outside) + head_stored(setting.shape, setting.itemsize, tokens)
    if memory.recompute == "full":
        deepest = tokens * measured.largest_layer * whole / measured.layers
        return StoredBytes(count * layer_input(setting, tokens), outside, round(deepest) + constant)
    saved = sum(getattr(measured, part) for part in _PARTS if setting.recomputes(part))
    if setting.recomputes("core_attn"):
        saved += measured.sums + (whole - measured.layers)
    return StoredBytes(round(tokens * (whole - saved)) + count * constant, outside, round(tokens * saved / count))


def outside_activations(setting: FsdpSetting, tokens: int) -> int:
    """Returns the bytes outside of layers: ids, rotary angles, final norm, and what the head stores."""
    shape, e = setting.shape, setting.itemsize
    angles = 2 * e * tokens * (shape.latent.rope_dim if shape.latent else shape.head_dim)
    angles *= _ROTATIONS if _is_bound(setting) else 1
    kept = _INT64 * tokens + angles + _norm(setting, tokens, shape.hidden_size)
    return kept + head_stored(shape, e, tokens)


def head_stored(shape: ModelDescription, itemsize: int, tokens: int) -> int:
    """Returns the bytes that the head stores: hidden states of trained tokens, and of a policy sums of their logits."""
    if shape.head == "value":
        return _FLOAT32 * tokens * shape.hidden_size
    return itemsize * tokens * shape.hidden_size + LOG_PROB_BYTES * tokens


def head_peak(shape: ModelDescription, itemsize: int, tokens: int, *, backward: bool) -> int:
    """Returns the temporary bytes of log-probs; the same function as with Megatron, with the whole vocabulary."""
    return (
        0
        if shape.head == "value"
        else head_bytes(shape.hidden_size, itemsize, shape.vocab_size, tokens, backward=backward)
    )


def layer_activations(setting: FsdpSetting, tokens: int, *, has_experts: bool) -> int:
    """Returns the bytes of one layer; with full recomputation, its input."""
    if setting.memory.recompute == "full":
        return layer_input(setting, tokens)
    return _layer(setting, tokens, has_experts=has_experts, recompute=True)


def layer_input(setting: FsdpSetting, tokens: int) -> int:
    """Returns the bytes of a layer's input."""
    return setting.itemsize * tokens * setting.shape.hidden_size


def forward_peak(setting: FsdpSetting, tokens: int) -> int:
    """Returns the bytes of the largest tensors of one layer at once, in a pass without gradients."""
    shape, e = setting.shape, setting.itemsize
    hidden, experts = shape.hidden_size, shape.experts
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    parts = [3 * heads, 3 * _ffn_size(shape), 5 * hidden]  # the last of a norm, in float32
    if experts:
        parts.append(3 * experts.top_k * (hidden + experts.ffn_size) + 3 * experts.shared_ffn_size)
    return e * tokens * (4 * hidden + max(parts))


def backward_peak(setting: FsdpSetting, tokens: int) -> int:
    """Returns the bytes of gradients of activations at once: of a norm, in float32. Larger ones replace what they are
    computed from."""
    return 5 * _FLOAT32 * tokens * setting.shape.hidden_size


def _ffn_size(shape: ModelDescription) -> int:
    return shape.ffn_size or 4 * shape.hidden_size


def _is_bound(setting: FsdpSetting) -> bool:
    """True if the architecture is unknown: it may have norms around each part, of queries and keys too, and compute
    norms and their weights in float32."""
    return not isinstance(setting.shape, ModelShape)


def _layer(setting: FsdpSetting, tokens: int, *, has_experts: bool, recompute: bool) -> int:
    count = 4 if _is_bound(setting) else 2
    norms = count * _norm(setting, tokens, setting.shape.hidden_size)
    feed_forward = _experts if has_experts else _dense
    return norms + _attention(setting, tokens, recompute=recompute) + feed_forward(setting, tokens, recompute=recompute)


def _norm(setting: FsdpSetting, rows: int, width: int, stored: int | None = None) -> int:
    """Returns the bytes of a norm: its input in float32, the normed values in the model's dtype, and a factor a row.

    ``stored``: bytes a row of the tensor that the input is a view of, if the model's dtype is float32.
    """
    e = _FLOAT32 if _is_bound(setting) else setting.itemsize
    given = _FLOAT32 * width if e < _FLOAT32 or stored is None else stored
    weight = _FLOAT32 * width if _is_bound(setting) else 0  # a copy of it
    return rows * (given + e * width + _FLOAT32) + weight


def _attention(setting: FsdpSetting, tokens: int, *, recompute: bool) -> int:
    """Returns the bytes from the normed input to the output projection's input, which is stored in any case."""
    shape, e = setting.shape, setting.itemsize
    core_again = recompute and setting.recomputes("core_attn")
    value_dim = shape.latent.value_dim if shape.latent else shape.head_dim
    kept = e * tokens * (shape.hidden_size + shape.num_heads * value_dim)
    if shape.latent is not None:
        kept += _latent_projections(setting, tokens)
    elif not isinstance(shape, ModelShape) or shape.qk_norm:
        rows = tokens * (shape.num_heads + shape.num_kv_heads)
        kept += _norm(setting, rows, shape.head_dim)
    if core_again:
        return kept + _core_inputs(setting, tokens)
    return kept + _core(setting, tokens, value_dim)


def _core_inputs(setting: FsdpSetting, tokens: int) -> int:
    """Returns the bytes of queries, keys and values as they are before any exchange."""
    shape, e, latent = setting.shape, setting.itemsize, setting.shape.latent
    if latent is not None:  # values are a view of the up projection's output
        return e * tokens * shape.num_heads * (2 * shape.head_dim + latent.nope_dim + latent.value_dim)
    return e * tokens * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


def _core(setting: FsdpSetting, tokens: int, value_dim: int) -> int:
    """Returns the bytes of the attention kernel: inputs, output and sums. Values are padded to the width of keys.

    On one rank a kernel's output is the output projection's input, unless it is padded.
    """
    e, cp, width, heads = setting.itemsize, setting.cp, setting.shape.head_dim, setting.shape.num_heads
    groups = setting.kv_heads
    output, sums = e * tokens * heads * width, _FLOAT32 * tokens * heads
    inputs = e * tokens * (heads + 2 * groups) * width
    if setting.exchange == "ulysses":
        inputs = e * tokens * (heads + 2 * lcm(groups, cp)) * width
    elif setting.exchange == "all_gather":  # keys and values of whole sequences, and of half a chunk twice
        inputs = e * tokens * heads * width + e * (tokens * (2 * cp + 1) // 2) * groups * 2 * width
    if setting.kernels == "padded":
        return inputs + 2 * output + sums
    shared = cp == 1 and width == value_dim
    return inputs + (0 if shared else output) + sums


def _latent_projections(setting: FsdpSetting, tokens: int) -> int:
    """Returns the bytes of the down projections' norms, and of these norms' outputs."""
    latent, e = setting.shape.latent, setting.itemsize
    assert latent is not None
    joined = _FLOAT32 * (latent.kv_rank + latent.rope_dim)
    kept = _norm(setting, tokens, latent.kv_rank, joined) + e * tokens * latent.kv_rank
    if latent.query_rank is not None:
        kept += _norm(setting, tokens, latent.query_rank) + e * tokens * latent.query_rank
    return kept


def _dense(setting: FsdpSetting, tokens: int, *, recompute: bool) -> int:
    """Returns the bytes of SwiGLU: input, gate, its activation, up and their product."""
    e, shape = setting.itemsize, setting.shape
    kept = e * tokens * shape.hidden_size
    return kept if recompute and setting.recomputes("mlp") else kept + 4 * e * tokens * _ffn_size(shape)


def _experts(setting: FsdpSetting, tokens: int, *, recompute: bool) -> int:
    """Returns the bytes of a layer of experts, by transformers' grouped products."""
    experts, e, shape = setting.shape.experts, setting.itemsize, setting.shape
    assert experts is not None
    layer_input = e * tokens * shape.hidden_size
    if recompute and setting.recomputes("moe"):
        return layer_input
    selected = tokens * experts.top_k
    weight = _FLOAT32 if experts.score == "sigmoid" or not _casts_weights(shape) else e
    rows = selected * (e * (2 * shape.hidden_size + 4 * experts.ffn_size) + weight)
    order = 3 * _INT64 * selected  # by expert, from each token, and back
    kept = layer_input + rows + order + _INT32 * experts.num_experts + _router(setting, tokens)
    if experts.shared_ffn_size and not (recompute and setting.recomputes("shared_experts")):
        kept += 4 * e * tokens * experts.shared_ffn_size
    return kept


def _casts_weights(shape: ModelDescription) -> bool:
    """True if the family casts experts' weights to the model's dtype; Mixtral leaves them in float32."""
    return isinstance(shape, ModelShape) and shape.family != "mixtral"


def _router(setting: FsdpSetting, tokens: int) -> int:
    """Returns the bytes of probabilities, selected experts and their normalisation. DeepSeek's router computes in
    float32, by copies of its input and its weight."""
    experts, shape = setting.shape.experts, setting.shape
    assert experts is not None
    kept = tokens * (_FLOAT32 * experts.num_experts + _INT64 * experts.top_k)
    if experts.normalise:
        kept += _FLOAT32 * tokens * (experts.top_k + 1)
    if experts.score == "sigmoid" or _is_bound(setting):
        if setting.itemsize < _FLOAT32:
            kept += _FLOAT32 * shape.hidden_size * (tokens + experts.num_experts)
        groups = experts.num_groups or 1
        kept += tokens * (experts.num_experts + _INT64 * (2 * groups + (experts.groups_kept or 1)))
    return kept
