"""Checks heads that guess from the policy's hidden states (docs/sampling.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhpc.checkpoint.formats.described import read_tensors
from rlhpc.config.rollout import RolloutSection
from rlhpc.core.errors import UserError
from rlhpc.core.inputs import read_json_object
from rlhpc.models import ModelDescription
from rlhpc.models.heads import KEY, EagleHead
from rlhpc.plan.estimates.draft_model import draft_head
from rlhpc.sharding.engine_shards import engine_vocab

_WITHOUT_STATES = ("MixtralForCausalLM",)  # of the known families: vLLM returns no hidden states of their layers
_WITH_MTP = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
_UNUSED = ("t2d",)  # the table from the policy's tokens to the head's


def head_faults(section: RolloutSection, policy: ModelDescription, *, weights: bool) -> Iterator[UserError]:
    """What keeps a head from guessing the policy's tokens. ``weights``: its files are on this machine."""
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
    """What keeps a policy's own layers from guessing. ``folder``: the policy's; ``weights``: its files are on this
    machine."""
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
