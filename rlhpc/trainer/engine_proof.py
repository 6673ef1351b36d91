"""Proves that vLLM computes a model as transformers does, on a random tiny copy of its config with heads of real size.

The copy is served as a run would serve it, in float32; the log-probs of what it samples must be those of transformers.
Beyond the limit, fields of config.json take the default of their class in transformers' copy. Where both then agree,
the engine ignores those fields. ``python -m rlhpc.trainer.engine_proof FOLDER`` prints the result as JSON; without one,
the proof could not run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rlhpc.api import Completion, Request
from rlhpc.backends.fsdp.probe import Unfit, fill, random_model, tiny_copy
from rlhpc.backends.fsdp.sharded_model import BuildOptions, build_on_meta, persistent_buffers
from rlhpc.backends.fsdp.tiny_config import FIRST_TOKEN, LAST_TOKEN
from rlhpc.checkpoint.formats.described import describe_model
from rlhpc.config.rollout import RolloutSection
from rlhpc.core.errors import UserError, one_line
from rlhpc.models import ModelShape
from rlhpc.plan.checks.architecture import ProbeResult
from rlhpc.reshard.discovered import not_covered
from rlhpc.rollout.vllm_arguments import ServedModel
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.sharding.shards import model_tensors

LIMIT, LIMIT_GPU = 1e-4, 1e-2  # of a log-prob, in nats
_LENGTHS, _RESPONSE = (21, 5, 40, 1), 16  # tokens of the prompts, beyond tiny windows, and of each response
_CONTEXT = 64
_BUFFERS = 0.05  # noise on them
_MOST_FIELDS = 3  # that an engine ignores at once
_REASON = 300  # letters


@dataclass(frozen=True)
class ProofSample:
    """Prompt and response of an engine, with its log-probs of the response."""

    tokens: tuple[int, ...]
    log_probs: Float[Tensor, " response"]


def prove(config: PretrainedConfig) -> ProbeResult:
    """Serves a tiny copy. Raises Unfit if transformers has none."""
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(prefix="rlhpc-engine-") as name:
        torch.manual_seed(0)
        tiny = tiny_copy(config, real_heads=True)
        reference = scaled(random_model(tiny))
        reference.save_pretrained(name)
        try:
            sampled = _served(Path(name))
        except (OSError, MemoryError, torch.OutOfMemoryError):  # of this machine now: no result is kept
            raise
        except Exception as error:  # of any type: vLLM's own, for what it cannot serve
            return ProbeResult(works=False, reason=_line(error))
        return compared(config, tiny, reference, sampled, LIMIT_GPU if torch.cuda.is_available() else LIMIT)


def compared(
    config: PretrainedConfig,
    tiny: PretrainedConfig,
    reference: PreTrainedModel,
    sampled: Sequence[ProofSample],
    limit: float,
) -> ProbeResult:
    """The result of an engine's samples of ``reference``, whose configuration is ``tiny``; ``config``: the real one."""
    apart = distance(reference, sampled)
    differences = {"engine, log-probs": apart}
    if apart <= limit:
        return ProbeResult(works=True, differences=differences)
    reason, real, defaults = f"log-probs differ by {apart:.2g} nats", config.to_dict(), type(config)().to_dict()
    fields = {name: defaults.get(name) for name, value in real.items() if value != defaults.get(name)}
    if names := ignored(tiny, fields, reference, sampled, limit):
        named = ", ".join(f"{name} = {_short(real[name])}" for name in names)
        reason = f"vLLM ignores {named} (config.json): {reason}"
    return ProbeResult(works=False, reason=reason[:_REASON], differences=differences)


def ignored(
    tiny: PretrainedConfig,
    fields: Mapping[str, Any],
    reference: PreTrainedModel,
    sampled: Sequence[ProofSample],
    limit: float,
) -> tuple[str, ...]:
    """Those of ``fields``, with other values, with which transformers computes the log-probs of an engine."""
    found: dict[str, Any] = {}
    least = distance(reference, sampled)
    while least > limit:
        tried = {}
        for name, value in fields.items():
            model = None if name in found else with_fields(tiny, {**found, name: value}, reference)
            tried[name] = float("inf") if model is None else distance(model, sampled)
        nearest = min(tried, key=lambda name: tried[name], default=None)
        if nearest is None or tried[nearest] >= least or len(found) == _MOST_FIELDS:
            return ()
        found[nearest], least = fields[nearest], tried[nearest]
    return tuple(found)


def with_fields(
    config: PretrainedConfig, fields: Mapping[str, Any], reference: PreTrainedModel
) -> PreTrainedModel | None:
    """A model with other fields and the very weights of ``reference``; None where it has other weights."""
    shapes = {name: parameter.shape for name, parameter in reference.named_parameters()}
    try:
        changed = type(config).from_dict({**config.to_dict(), **fields})
        model = build_on_meta(changed, BuildOptions(attention="eager", compute_dtype=torch.float32))
        if {name: parameter.shape for name, parameter in model.named_parameters()} != shapes:
            return None
        fill(model, reference)
    except Exception:  # of any type: transformers' own, for fields that do not suit each other
        return None
    return model


@torch.no_grad()
def distance(model: PreTrainedModel, sampled: Sequence[ProofSample]) -> float:
    """Largest difference of an engine's log-probs from the model's, in nats; infinite where it has none."""
    found = 0.0
    for one in sampled:
        tokens = torch.tensor([one.tokens])
        try:
            log_probs = model(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1)
        except Exception:  # of any type, of a changed configuration
            return float("inf")
        first = len(one.tokens) - len(one.log_probs)
        expected = log_probs[first - 1 : -1].gather(-1, tokens[0, first:, None])[:, 0]
        apart = float((expected - one.log_probs).abs().max())
        found = max(found, apart if apart == apart else float("inf"))
    return found


@torch.no_grad()
def scaled(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights as small as keeps the size of activations: heads of real size make its layers wide."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(parameter.shape[-1] ** -0.5 / parameter.std().clamp(min=1e-6))
    for buffer in persistent_buffers(model).values():  # biases of routers
        if buffer.is_floating_point():
            buffer.add_(_BUFFERS * torch.randn(buffer.shape))
    return model


def sequences() -> list[tuple[int, ...]]:
    """Prompts of ordinary tokens."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(FIRST_TOKEN, LAST_TOKEN, (n,), generator=generator).tolist()) for n in _LENGTHS]


def _served(folder: Path) -> list[ProofSample]:
    """Samples of vLLM, which has its weights as in a run: a known family's by its table, others' as discovered."""
    shape = describe_model(folder)
    section = RolloutSection(kv_cache_gib=0.125, max_num_seqs=len(_LENGTHS), cuda_graphs=False)
    engine = VllmEngine(ServedModel(folder, shape, "float32", _CONTEXT), section)
    try:
        if not isinstance(shape, ModelShape):
            tensors = model_tensors(shape)
            if missing := not_covered(tensors, {0: engine.discover_shards(tensors)}):
                raise UserError(f"vLLM's parameters lack {missing[0]}")
        engine.wake_weights()
        engine.load_weights(_weights(folder))
        engine.wake_cache()
        requests = [Request(prompt, seed, _RESPONSE, 1.0) for seed, prompt in enumerate(sequences())]
        completions = engine.generate(requests)
    finally:
        engine.shutdown()
    return [_sampled(request, completion) for request, completion in zip(requests, completions, strict=True)]


def _weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def _sampled(request: Request, completion: Completion) -> ProofSample:
    return ProofSample((*request.prompt, *completion.tokens.tolist()), torch.as_tensor(completion.log_probs))


def _line(error: Exception) -> str:
    text = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return one_line(text)[:_REASON]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def main(folder: str) -> int:
    """Prints the result as the last line; returns 1 where there is none."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    try:
        result = prove(AutoConfig.from_pretrained(folder, local_files_only=True))
    except Unfit as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result.as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
