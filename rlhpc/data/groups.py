"""Groups of samples of one prompt: selection, replay, and the files that carry them over to the next attempt."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.api import Prompt, Sample
from rlhpc.config.rollout import DynamicSamplingSection, ReplaySection
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.imports import import_attribute
from rlhpc.core.storage import patiently

_ARRAYS = (
    *("tokens", "log_probs", "response_mask", "routed_experts", "token_versions", "reference_log_probs"),
    *("kept_tokens", "kept_counts"),
)
_INDEX = "index"


@dataclass(frozen=True)
class Group:
    """Responses to one prompt that are compared with each other.

    ``number`` is the prompt's unique place in the run's order of prompts. ``step`` is the step in which the group was
    first requested, ``first_sample`` the number of earlier samples of the prompt in that step; both seed the sampling.
    Until a response is scored, ``samples`` holds its draft, whose reward is undefined.
    """

    number: int
    step: int
    first_sample: int
    samples: tuple[Sample, ...]
    scored: tuple[bool, ...]
    dropped: tuple[bool, ...]  # excluded from training because a reward failed

    @property
    def prompt_id(self) -> int:
        return self.samples[0].prompt_id

    @property
    def finished(self) -> bool:
        return all(self.scored)

    @property
    def usable(self) -> tuple[Sample, ...]:
        """The scored samples that are not dropped."""
        return tuple(s for s, scored, out in zip(self.samples, self.scored, self.dropped, strict=True) if scored > out)

    @property
    def policy_version(self) -> int:
        """Policy version that sampled its oldest token."""
        return min(sample.policy_version for sample in self.samples)

    def answers(self, prompt: Prompt) -> bool:
        """True if the responses are to this prompt."""
        first = self.samples[0]
        return prompt.prompt_id == first.prompt_id and prompt.tokens == tuple(first.tokens[: first.prompt_len].tolist())

    def with_sample(self, index: int, sample: Sample, *, scored: bool, dropped: bool = False) -> Group:
        """The group with the sample at ``index`` replaced."""
        return replace(
            self,
            samples=(*self.samples[:index], sample, *self.samples[index + 1 :]),
            scored=(*self.scored[:index], scored, *self.scored[index + 1 :]),
            dropped=(*self.dropped[:index], dropped, *self.dropped[index + 1 :]),
        )


def training_samples(groups: Sequence[Group], *, mask_truncated: bool) -> list[Sample]:
    """The usable samples, group by group, with the group's place as group id. ``mask_truncated`` masks all tokens of
    truncated responses, which still count in their group."""
    samples = []
    for place, group in enumerate(groups):
        for sample in group.usable:
            masked = mask_truncated and sample.truncated
            response_mask = np.zeros(sample.response_len, bool) if masked else _without_stop(sample)
            samples.append(replace(sample, group_id=place, response_mask=response_mask))
    return samples


def _without_stop(sample: Sample) -> np.ndarray | None:
    """The response mask, without a text that ended the response and is not trained on."""
    if not sample.stop_tokens:
        return sample.response_mask
    mask = np.ones(sample.response_len, bool) if sample.response_mask is None else sample.response_mask.copy()
    mask[-sample.stop_tokens :] = False
    return mask


def save_groups(file: Path, lists: Mapping[str, Sequence[Group]]) -> None:
    """Writes named lists of groups into one .npz file."""
    arrays: dict[str, np.ndarray] = {}
    index: dict[str, list[dict[str, Any]]] = {}
    for name, groups in lists.items():
        index[name] = []
        for group in groups:
            record = {f.name: getattr(group, f.name) for f in fields(group)}
            record["samples"] = [_pack(sample, arrays) for sample in group.samples]
            index[name].append(record)
    arrays[_INDEX] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    patiently(lambda: _write(file, arrays), file)


def load_groups(file: Path, *, routed_experts: bool = True) -> dict[str, list[Group]]:
    """Reads bit for bit what ``save_groups`` wrote; ``routed_experts``: these too."""
    names = _ARRAYS if routed_experts else tuple(name for name in _ARRAYS if name != "routed_experts")
    with np.load(file, allow_pickle=False) as arrays:
        index = json.loads(arrays[_INDEX].tobytes())
        return {name: [_group(record, arrays, names) for record in records] for name, records in index.items()}


def without_routed_experts(group: Group) -> Group:
    """The group as it is sent to ranks that do not train on its routed experts."""
    return replace(group, samples=tuple(replace(sample, routed_experts=None) for sample in group.samples))


def with_routed_experts(group: Group, known: Group) -> Group:
    """The group with the routed experts of ``known``, which is the same otherwise but for rewards."""
    both = zip(group.samples, known.samples, strict=True)
    return replace(group, samples=tuple(replace(one, routed_experts=other.routed_experts) for one, other in both))


def save_routed_experts(file: Path, groups: Iterable[Group]) -> None:
    """Writes the routed experts present on this rank into one .npz file; no file if there are none."""
    found = {
        f"{group.number}.{place}": sample.routed_experts
        for group in groups
        for place, sample in enumerate(group.samples)
        if sample.routed_experts is not None
    }
    if found:
        patiently(lambda: _write(file, found), file)


def _write(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with open(file, "wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # its stubs take the names for options
        stream.flush()
        os.fsync(stream.fileno())


def with_routed_experts_of(file: Path, groups: Sequence[Group]) -> list[Group]:
    """The groups, with routed experts read from the file that ``save_routed_experts`` wrote."""
    with np.load(file, allow_pickle=False) as arrays:
        return [
            replace(
                group,
                samples=tuple(
                    replace(sample, routed_experts=arrays.get(f"{group.number}.{place}", sample.routed_experts))
                    for place, sample in enumerate(group.samples)
                ),
            )
            for group in groups
        ]


def _pack(sample: Sample, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The sample's plain fields; adds its arrays to ``arrays`` under names that begin with its key."""
    key = str(len(arrays))
    record = {f.name: getattr(sample, f.name) for f in fields(sample) if f.name not in _ARRAYS}
    record["key"] = key
    for name in _ARRAYS:
        if getattr(sample, name) is not None:
            arrays[f"{key}.{name}"] = getattr(sample, name)
    return record


def _group(record: dict[str, Any], arrays: Any, names: Sequence[str]) -> Group:
    samples = []
    for packed in record["samples"]:
        key = packed.pop("key")
        found = {name: arrays.get(f"{key}.{name}") for name in names}
        if "tool_tokens" not in packed:  # a checkpoint of a former version
            mask = found["response_mask"]
            packed["tool_tokens"] = 0 if mask is None else int((~mask).sum())
        samples.append(Sample(**packed, **found))
    states = {name: tuple(record[name]) for name in ("scored", "dropped")}
    return Group(**{**record, **states, "samples": tuple(samples)})


Filter = Callable[[Sequence[Sample]], bool]

_WHERE = "train.dynamic_sampling.filter"


def make_filter(section: DynamicSamplingSection) -> Filter:
    """Filter that accepts a group if its samples' metric differs, or by the user's function."""
    if section.filter is not None:
        return functools.partial(_ask, import_attribute(section.filter, _WHERE), section)
    return lambda samples: len({_score(sample, section.metric) for sample in samples}) > 1


def _ask(own: Callable[..., object], section: DynamicSamplingSection, samples: Sequence[Sample]) -> bool:
    """Calls the user's filter."""
    try:
        return bool(own(samples, **section.arguments))
    except Exception as error:  # the user's code may raise anything
        what = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"{section.filter} raised {what}", where=_WHERE, remedy="fix it, or its arguments") from error


def _score(sample: Sample, metric: str) -> float:
    if metric == "reward":
        return sample.reward
    try:
        return sample.reward_parts[metric]
    except KeyError:
        if _has_failed(sample, metric.rpartition("/")[0]):
            return 0.0
        raise UserError(
            f"the reward has no part {metric!r}",
            where="train.dynamic_sampling.metric",
            remedy=f"use reward, or one of {', '.join(sample.reward_parts) or '(none)'}",
        ) from None


def _has_failed(sample: Sample, function: str) -> bool:
    """True if the reward function of that name ("" for a single one) may have failed: its reward is 0 and it returned
    no further parts."""
    if not function:
        return not sample.reward_parts and not sample.reward
    has_more = any(name.startswith(f"{function}/") for name in sample.reward_parts)
    return sample.reward_parts.get(function) == 0 and not has_more


class ReplayBuffer:
    """The newest ``capacity`` groups, oldest first. The same on every rank."""

    def __init__(self, section: ReplaySection, groups: Iterable[Group] = ()) -> None:
        self._section = section
        self.groups: list[Group] = []
        self.add(groups)

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Adds the groups of a step; drops the oldest beyond the capacity."""
        self.groups = [*self.groups, *groups][-self._section.capacity :]

    def forget_stale(self, policy_version: int) -> None:
        """Drops groups with more than the maximum staleness."""
        oldest = policy_version - self._section.max_staleness
        self.groups = [group for group in self.groups if group.policy_version >= oldest]

    def sample(self, count: int, seed: int, step: int) -> list[Group]:
        """``count`` distinct groups, oldest first, which stay in the buffer. Determined by the arguments."""
        assert count <= len(self.groups), f"{count} of {len(self.groups)} groups"
        if self._section.order == "newest":
            return self.groups[len(self.groups) - count :]
        places = random.Random(f"replay:{seed}:{step}").sample(range(len(self.groups)), count)
        return [self.groups[place] for place in sorted(places)]
