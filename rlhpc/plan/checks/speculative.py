"""Checks of speculative decoding and of heads that guess (docs/sampling.md)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlhpc.checkpoint.formats.described import read_tensors
from rlhpc.checkpoint.formats.model_folder import check_weights
from rlhpc.checkpoint.formats.torch_dist_metadata import is_torch_dist
from rlhpc.checkpoint.formats.weight_table import is_sharded
from rlhpc.config.rollout import GUESSERS, RolloutSection, SpeculativeSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.inputs import read_json_object
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.models.heads import KEY, EagleHead
from rlhpc.plan.checks.engine_arguments import engine_fields
from rlhpc.plan.checks.parallelism import check_engine
from rlhpc.plan.checks.sampling import resolved_sections
from rlhpc.plan.estimates.engine_weights import draft_head, draft_shape
from rlhpc.plan.estimates.memory import sequence_tokens
from rlhpc.sharding.engine_shards import engine_vocab

_WITHOUT_STATES = ("MixtralForCausalLM",)  # of the known families: vLLM returns no hidden states of their layers
_WITH_MTP = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
_UNUSED = ("t2d",)  # the table from the policy's tokens to the head's


def head_faults(section: RolloutSection, policy: ModelDescription, *, weights: bool) -> Iterator[UserError]:
    """Reasons that keep a head from guessing the policy's tokens. ``weights``: its files are on this machine."""
    head = draft_head(section)
    assert head is not None
    assert section.speculative is not None
    assert section.speculative.model is not None
    if head.method == "eagle3" and policy.architecture in _WITHOUT_STATES:
        yield UserError(
            f"vLLM returns no hidden states of {policy.architecture} to a head of eagle3",
            where="rollout.speculative.method",
            remedy="use a head of eagle, or another method",
        )
    own = "use a head that was made for this policy"
    for name, found, wanted in (
        ("a vocabulary", head.vocab_size, policy.vocab_size),
        ("hidden states", head.hidden_size, policy.hidden_size),
        ("hidden states", head.target_hidden_size, policy.hidden_size),
    ):
        if found != wanted:
            yield UserError(f"{name} of {found}, not of {wanted} as the policy's", where=KEY, remedy=own)
            return
    cut = {"heads": head.num_heads, "rows of its MLP": head.ffn_size, "rows": engine_vocab(head.draft_vocab_size)}
    for what, size in cut.items():
        if size % section.tp:
            yield UserError(
                f"the head: {section.tp} does not divide {size} {what}", where="rollout.tp", remedy="lower it"
            )
    if weights:
        yield from _file_faults(section.speculative.model, head)


def mtp_faults(folder: Path, policy: ModelDescription, *, weights: bool) -> Iterator[UserError]:
    """Reasons that keep a policy's own layers from guessing. ``folder``: the policy's; ``weights``: its files are on
    this machine."""
    if policy.architecture not in _WITH_MTP:
        yield UserError(
            f"engines of {policy.architecture} are not known to guess by its own layers",
            where="rollout.speculative.method",
            remedy=f"use another method; mtp is for {' and '.join(_WITH_MTP)}",
        )
        return
    count = read_json_object(folder / "config.json", remedy="restore the file").get("num_nextn_predict_layers")
    what = f"num_nextn_predict_layers is {str(count)[:80]} in its config.json" if count != 1 else None
    if what is None and weights:
        name = f"model.layers.{policy.num_layers}.eh_proj.weight"
        try:
            found = any(tensor.name == name for tensor in read_tensors(folder))
        except UserError as error:
            yield error
            return
        what = None if found else f"no tensor {name!r}"
    if what is not None:
        yield UserError(
            f"no layer that predicts a further token, as mtp needs: {what}",
            where=str(folder),
            remedy="use a folder with that layer, as it was published: exports and conversions leave it out",
        )


def _file_faults(folder: Path, head: EagleHead) -> Iterator[UserError]:
    """The first fault of a head's files."""
    try:
        found = {tensor.name.replace("midlayer.", "layers.0."): tensor.shape for tensor in read_tensors(folder)}
    except UserError as error:
        yield error
        return
    remedy = f"use a head of {head.method} as it was published, in safetensors"
    for name, shape in {**head.tensors, **{n: s for n, s in head.tables.items() if n in found}}.items():
        if found.get(name) != shape:
            has = f"{name} is of {list(found[name])}, not {list(shape)}" if name in found else f"no tensor {name!r}"
            yield UserError(f"no head of {head.method}: {has}", where=str(folder), remedy=remedy)
            return
    for name in sorted(found.keys() - head.tensors.keys() - head.tables.keys() - set(_UNUSED)):
        yield UserError(f"no head of {head.method}: a tensor {name!r}", where=str(folder), remedy=remedy)
        return


_WHERE = "rollout.speculative"
_MODEL = f"{_WHERE}.model"
_KEYS = {
    "method": "method",
    "model": "model",
    "num_speculative_tokens": "tokens",
    "prompt_lookup_min": "min_match",
    "prompt_lookup_max": "max_match",
}
_MODELS = ("draft_model_config", "draft_tensor_parallel_size", "draft_load_config", "use_heterogeneous_vocab")
_OWN = ("rejection_sample_method", "draft_sample_method", "synthetic_acceptance_rates", "disable_padded_drafter_batch")


def speculative_faults(config: RunConfig) -> Iterator[UserError]:
    """Keys that vLLM refuses with guesses, and methods whose order of generation could not be repeated."""
    section = config.rollout.speculative
    if section is None:
        return
    for where, sampling in resolved_sections(config):
        for name in ("min_p", "logit_bias"):
            given = getattr(sampling, name)
            inherited = where != "rollout.sampling" and given == getattr(config.rollout.sampling, name)
            if given and not inherited:
                yield UserError(
                    "vLLM does not take it with rollout.speculative", where=f"{where}.{name}", remedy="leave out one"
                )
    yield from _argument_faults(section)
    if section.method == "ngram" and section.min_match > section.max_match:
        yield UserError(
            f"{section.min_match} is above max_match, {section.max_match}",
            where=f"{_WHERE}.min_match",
            remedy="lower it",
        )
    yield from _model_faults(section)
    if section.by_network and config.rollout.engine.get("async_scheduling"):
        yield UserError(
            "guesses of a model need each step's tokens before the next step",
            where="rollout.engine.async_scheduling",
            remedy="leave it out",
        )
    package = GUESSERS.get(section.method)
    here = engine_fields() is not None and not config.slurm.other_python
    if here and package is not None and find_spec(package) is None:
        yield UserError(
            f"{section.method} needs the package {package}, which is not installed beside vLLM",
            where=f"{_WHERE}.method",
            remedy="install it, or choose another method",
        )
    if section.method == "suffix" and (order := _order(config)):
        yield UserError(
            f"what suffix guesses depends on all that an engine has answered, and {order} follows the engine's steps:"
            " a run that goes on would not equal one that was not stopped",
            where=f"{_WHERE}.method",
            remedy="use ngram",
        )


def draft_faults(config: RunConfig, policy: ModelDescription, *, weights: bool = True) -> Iterator[UserError]:
    """Reasons that keep a second model or a head from guessing; ``_model_faults`` refuses a wrong path.
    ``weights``: its files are on this machine."""
    section = config.rollout.speculative
    if section is not None and section.method == "mtp":
        yield from mtp_faults(config.model.path, policy, weights=weights)
    if section is None or section.model is None or not (section.model / "config.json").is_file():
        return
    if section.method != "draft_model":
        yield from head_faults(config.rollout, policy, weights=weights)
        return
    shape = draft_shape(config.rollout)
    assert shape is not None
    if shape.experts is not None or shape.latent is not None:
        yield UserError("guesses are those of a dense model", where=_MODEL, remedy="use a small dense model")
        return
    if shape.vocab_size != policy.vocab_size:
        yield UserError(
            f"a vocabulary of {shape.vocab_size}, the policy's has {policy.vocab_size}",
            where=_MODEL,
            remedy="use a model of the same family: both read the same tokens",
        )
    if sequence_tokens(config) > shape.usable_positions:
        yield UserError(
            f"{shape.usable_positions} positions, but a prompt with its response has up to {sequence_tokens(config)}",
            where=_MODEL,
            remedy="use a model with more, or lower rollout.max_response_tokens",
        )
    try:
        check_engine(shape, config.rollout)
    except UserError as error:
        yield UserError(f"the second model: {error.message}", where=error.where, remedy=error.remedy)
    if weights:
        yield from _weights_faults(section.model, shape)


def _weights_faults(folder: Path, shape: ModelShape) -> Iterator[UserError]:
    """The first fault of the second model's files; it is loaded from safetensors alone."""
    try:
        if is_sharded(folder) or is_torch_dist(folder):
            raise UserError("a checkpoint", where=str(folder), remedy="export it to safetensors")
        check_weights(folder, shape)
    except UserError as error:
        yield error


def _model_faults(section: SpeculativeSection) -> Iterator[UserError]:
    """A second model or head without the method, or the method without one."""
    if section.method not in ("draft_model", "eagle", "eagle3"):
        if section.model is not None:
            remedy = "set method to draft_model, eagle or eagle3, or leave out the model"
            yield UserError(f"{section.method} guesses without a model", where=_MODEL, remedy=remedy)
    elif section.model is None:
        what = "a second model" if section.method == "draft_model" else "a head"
        yield UserError(f"{section.method} needs {what}", where=_MODEL, remedy="set it to the model's folder")
    elif not (section.model / "config.json").is_file():
        yield UserError(f"no config.json in {str(section.model)!r}", where=_MODEL, remedy="correct the path")


def _argument_faults(section: SpeculativeSection) -> Iterator[UserError]:
    for name in section.arguments:
        where = f"{_WHERE}.arguments.{name}"
        if name in _KEYS:
            yield UserError("set by another key", where=where, remedy=f"set {_WHERE}.{_KEYS[name]}")
        elif name in _MODELS:
            yield UserError(
                "a second model is loaded as the policy is, and reads its tokens", where=where, remedy="leave it out"
            )
        elif name in _OWN:
            yield UserError("the toolkit decides which guesses are right", where=where, remedy="leave it out")


def _order(config: RunConfig) -> str | None:
    """The key by which it depends on the steps of engines which responses a step has."""
    if config.placement in ("separate", "lend") and config.asynchrony.schedule == "deterministic":
        return "asynchrony.schedule: deterministic"
    dynamic = config.train.dynamic_sampling
    return "train.dynamic_sampling.oversample" if dynamic is not None and dynamic.oversample > 1 else None
