"""Proves that this back end computes an architecture as transformers does, on a random tiny copy of its config.

Documents packed in one row must give the logits and gradients of each document alone through eager attention, and two
context-parallel ranks those of one; its layers, head and weights must be of a kind that can be sharded.
``python -m rlhpc.backends.fsdp.probe FOLDER`` prints the result as JSON.

The two ranks are threads of one process: ``run_threads(lambda group: program(group), 2)``.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rlhpc.backends.fsdp.attention_interface import longest_document, packed_attention
from rlhpc.backends.fsdp.documents import DocumentPack, attending_to
from rlhpc.backends.fsdp.policy_head import head_curve
from rlhpc.backends.fsdp.sharded_model import (
    BuildOptions,
    build_on_meta,
    decoder_layers,
    decoder_of,
    init_buffers,
    persistent_buffers,
    with_run_rope,
)
from rlhpc.backends.fsdp.stored import ModelWeight, stored_weights
from rlhpc.backends.fsdp.tiny_config import FIRST_TOKEN, LAST_TOKEN, tiny_settings
from rlhpc.core.errors import UserError, one_line
from rlhpc.plan.checks.architecture import ProbeResult

LENGTHS = (21, 5, 12, 1, 9)  # tokens of the documents; the first is the longest and exceeds tiny windows
_NAME = "rlhpc_probe"
_RANKS = 2
_TOLERANCE = 3e-5  # of logits, relative to the largest one; rounding is below 1e-5
_GRADIENTS = 1e-4  # of the gradient of a parameter, relative to its largest number
_SMALL = 1e-2  # gradients are compared relative to this share of the largest one at least
_VISIBLE = 1e-3  # difference that the tokens of another document make where they are seen
_MOST_PARAMETERS = 30e6
_REASON = 300  # letters
_ANY_LENGTH = 2**62  # tokens of a run, which LongRoPE does not limit
Found = tuple[Float[Tensor, "T V"], dict[str, Tensor]]  # logits and gradients by parameter


class Unfit(Exception):
    """Feature that the architecture lacks, in one line."""


def probe(folder: Path) -> ProbeResult:
    """Probes the architecture of the HuggingFace model in ``folder``."""
    return _probe(
        lambda: _running(
            lambda: AutoConfig.from_pretrained(folder, local_files_only=True),
            "transformers cannot read its config.json",
        )
    )


def probe_config(config: PretrainedConfig) -> ProbeResult:
    """Probes an architecture by its configuration."""
    return _probe(lambda: config)


def _probe(read: Callable[[], PretrainedConfig]) -> ProbeResult:
    """Computes on the CPU. Leaves the state of random numbers as it was."""
    differences: dict[str, float] = {}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            config = read()
            _prove(tiny_copy(config), differences)
            longest = longest_document(with_run_rope(config, _ANY_LENGTH))
            return ProbeResult(works=True, longest=longest, differences=differences)
    except Unfit as error:
        reason = str(error)
    except UserError as error:
        reason = error.message
    finally:
        AttentionInterface.register(_NAME, packed_attention)  # frees the tiny model
    return ProbeResult(works=False, reason=one_line(reason)[:_REASON], differences=differences)


def _prove(config: PretrainedConfig, differences: dict[str, float]) -> None:
    """Raises Unfit or UserError; records differences."""
    reference = random_model(config)
    tokens = torch.randint(FIRST_TOKEN, LAST_TOKEN, (sum(LENGTHS),))
    alone = _running(lambda: _alone(reference, tokens))
    _check_visible(reference, tokens, alone[0])
    _check_head(reference, tokens, alone[0])
    _check_weights(reference)
    packed = _Packed(config, reference)
    found = packed.run(tokens)
    differences |= _differences(found, alone, "packed")
    _compare(differences, "packed", "packed documents influence each other" + packed.without_attention())
    packed.check_calls()
    ranks = run_threads(lambda group: packed.run(tokens, group), _RANKS)
    summed = {name: sum(part[1][name] for part in ranks) for name in found[1]}
    differences |= _differences((ranks[0][0], summed), found, f"cp {_RANKS}")
    _compare(differences, f"cp {_RANKS}", f"{_RANKS} context-parallel ranks compute other values than one")


def _compare(differences: Mapping[str, float], name: str, what: str) -> None:
    for key, limit in (("logits", _TOLERANCE), ("gradients", _GRADIENTS)):
        found = differences[f"{name}, {key}"]
        if not found <= limit:  # also if it is not a number
            raise Unfit(f"{what}: {key} differ by {found:.2g} of the largest")


def tiny_copy(config: PretrainedConfig, *, real_heads: bool = False) -> PretrainedConfig:
    """Architecture with small sizes, as of ``tiny_settings``. Raises Unfit if its class refuses them."""
    made = functools.partial(tiny_settings, real_heads=real_heads)
    return _running(lambda: type(config).from_dict(made(config.to_dict())), "has no tiny copy")


def _running(program: Callable[[], Any], what: str = "a tiny copy does not run in transformers itself") -> Any:
    """Result of the program. transformers raises errors of any type for models that it cannot run."""
    try:
        return program()
    except (Unfit, UserError):
        raise
    except Exception as error:
        raise Unfit(f"{what}: {type(error).__name__}: {error}") from error


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """A tiny model as transformers builds it, with eager attention and random weights in float32."""

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        if (size := sum(parameter.numel() for parameter in model.parameters())) > _MOST_PARAMETERS:
            raise Unfit(f"a tiny copy of it would have {size / 1e6:.0f} million parameters")
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()

    model = _running(build)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            # Norms and biases start as constants; other weights as too small for attention to matter.
            parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else 0.12 * noise)
    return model


def _gradients(logits: Float[Tensor, "T V"], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a sum of all logits with random weights; zeros where there is none."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((logits * weights).sum() / len(logits), [*parameters.values()], allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if gradient is None else gradient for (name, p), gradient in pairs}


def _trained(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Parameters that have gradients: some models have constants among them."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _alone(model: PreTrainedModel, tokens: Int64[Tensor, " T"]) -> Found:
    """Logits and gradients of one document at a time."""
    parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(LENGTHS)]
    logits = torch.cat(parts)
    if not torch.isfinite(logits).all():
        raise Unfit("a tiny copy has logits that are not finite")
    return logits.detach(), _gradients(logits, _trained(model))


@torch.no_grad()
def _check_visible(model: PreTrainedModel, tokens: Int64[Tensor, " T"], alone: Float[Tensor, "T V"]) -> None:
    """A model whose tokens do not see others would prove nothing."""
    together = _running(lambda: model(input_ids=tokens[None], use_cache=False).logits[0])
    if _difference(together, alone) < _VISIBLE:
        raise Unfit("tokens of a tiny copy do not depend on earlier ones")


class _Packed:
    """Model with the same weights that is built and computed as ``ShardedModel`` does, but for the sharding."""

    def __init__(self, config: PretrainedConfig, reference: PreTrainedModel) -> None:
        AttentionInterface.register(_NAME, self._attend)
        options = BuildOptions(attention=_NAME, compute_dtype=torch.float32)
        self.module = _running(lambda: build_on_meta(config, options), "cannot be built without weights")
        _running(lambda: fill(self.module, reference), "has buffers that cannot be computed")
        self._parameters = _trained(reference)
        layers = decoder_layers(self.module)
        self._layer_of = {id(module): layer for layer, root in enumerate(layers) for module in root.modules()}
        self._count = len(layers)
        self._idle = set(range(self._count))  # layers without attention
        self._calls = 0

    def run(self, tokens: Int64[Tensor, " T"], group: ThreadGroup | None = None) -> Found:
        """Logits of all documents in one row, and gradients; of this rank's part with a group."""
        return _running(lambda: self._run(tokens, group), "packed documents do not run without an attention mask")

    def _run(self, tokens: Int64[Tensor, " T"], group: ThreadGroup | None) -> Found:
        pack = DocumentPack(LENGTHS, torch.device("cpu"), group)
        with attending_to(pack):
            inputs = {"input_ids": pack.select(tokens)[None], "position_ids": pack.positions[None]}
            logits = pack.gather(_logits(self.module, inputs))
            return logits.detach(), _gradients(logits, self._parameters)

    def _attend(self, module: nn.Module, *inputs: Any, **options: Any) -> Any:
        self._idle.discard(self._layer_of.get(id(module), -1))
        self._calls += 1
        return packed_attention(module, *inputs, **options)

    def check_calls(self) -> None:
        """Raises Unfit for an architecture with attention of its own."""
        if not self._calls:
            raise Unfit("its attention cannot be replaced")

    def without_attention(self) -> str:
        """The layers that do not call attention, for an error."""
        return f" ({len(self._idle)} of {self._count} layers do not use the attention function)" if self._idle else ""


def _not_a_number(buffer: Tensor, *, device: torch.device) -> Tensor:
    """Memory that shows whether it was written to."""
    value = torch.nan if buffer.is_floating_point() else torch.iinfo(torch.int8).max
    return torch.full_like(buffer, value, device=device)


def fill(module: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Gives a model without weights the very parameters of another one, and its persistent buffers; computes others."""
    init_buffers(module, torch.device("cpu"), _not_a_number)
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)
    for name, buffer in persistent_buffers(module).items():
        buffer.copy_(reference.get_buffer(name))


def _logits(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Float[Tensor, "T V"]:
    """Logits of a row, as the back end computes them: by the head from the decoder's output."""
    hidden = decoder_of(model)(**inputs, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden)[0]
    softcap, factor = head_curve(model.config)
    return (logits if softcap is None else (logits / softcap).tanh() * softcap) * factor


@torch.no_grad()
def _check_head(model: PreTrainedModel, tokens: Int64[Tensor, " T"], alone: Float[Tensor, "T V"]) -> None:
    """Raises Unfit if logits are not what the back end makes of the decoder's output."""
    head, longest = model.get_output_embeddings(), max(LENGTHS)
    if not isinstance(head, nn.Linear):
        raise Unfit(f"its head is a {type(head).__name__}, not a linear layer")
    logits = _running(
        lambda: _logits(model, {"input_ids": tokens[None, :longest]}), "its decoder and its head do not run"
    )
    if not (found := _difference(logits, alone[:longest])) <= _TOLERANCE:
        raise Unfit(f"its logits are not the output of its head: they differ by {found:.2g} of the largest")


def _check_weights(model: PreTrainedModel) -> None:
    """Raises UserError for weights that are not stored as cuts of parameters, and layers that cannot be found."""
    decoder_layers(model)
    sources = {name: ModelWeight(tuple(p.shape), sharded=True) for name, p in model.named_parameters()}
    buffers = persistent_buffers(model).items()
    stored_weights(model, sources | {name: ModelWeight(tuple(buffer.shape), sharded=False) for name, buffer in buffers})


def _differences(found: Found, expected: Found, name: str) -> dict[str, float]:
    least = _SMALL * max(float(gradient.abs().max()) for gradient in expected[1].values())
    gradients = [
        float((gradient - expected[1][key]).abs().max()) / max(float(expected[1][key].abs().max()), least)
        for key, gradient in found[1].items()
    ]
    return {f"{name}, logits": _difference(found[0], expected[0]), f"{name}, gradients": max(gradients)}


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected number."""
    return float((found - expected).abs().max() / expected.abs().max())


_SECONDS = 60.0  # until the absence of a rank from a collective fails the others
T = TypeVar("T")


class ThreadGroup(dist.ProcessGroup):
    """One thread's end of a group. Has the collectives that attention over context-parallel ranks uses."""

    def __init__(self, rank: int, lockstep: _Lockstep) -> None:
        super().__init__(rank, len(lockstep.tensors))
        self._lockstep = lockstep

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], options: Any
    ) -> None:
        assert not output_sizes, "parts are equal"
        assert not input_sizes, "parts are equal"
        with self._lockstep.all_of(self.rank(), given) as tensors:
            output.copy_(torch.cat([tensor.chunk(self.size())[self.rank()] for tensor in tensors]))

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any) -> None:
        with self._lockstep.all_of(self.rank(), given) as tensors:
            output.copy_(torch.cat(tensors))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any) -> None:
        with self._lockstep.all_of(self.rank(), given) as tensors:
            output.copy_(torch.stack([tensor.chunk(self.size())[self.rank()] for tensor in tensors]).sum(0))

    # Their names before torch 2.13.
    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single


class _Lockstep:
    """Meeting point at which the threads of a group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size)

    @contextmanager
    def all_of(self, rank: int, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Every thread's tensor; none goes on before all have left."""
        self.tensors[rank] = tensor
        self._barrier.wait(_SECONDS)
        yield list(self.tensors)
        self._barrier.wait(_SECONDS)

    def abort(self) -> None:
        """Fails the threads that wait here."""
        self._barrier.abort()


def run_threads(program: Callable[[ThreadGroup], T], size: int) -> list[T]:
    """Runs ``program`` in a thread for each rank; returns what each has returned. Raises the first error."""
    lockstep = _Lockstep(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadGroup(rank, lockstep))
        except BaseException as error:
            errors.append(error)
            lockstep.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def main(folder: str) -> None:
    """Prints the result of a probe as the last line."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps(probe(Path(folder)).as_json()))


if __name__ == "__main__":
    main(sys.argv[1])
