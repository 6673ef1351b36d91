"""Groups in a file and in the replay buffer."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from rlhpc.api import Prompt, Sample
from rlhpc.config.rollout import ReplaySection
from rlhpc.data.groups import (
    Group,
    ReplayBuffer,
    load_groups,
    save_groups,
    training_samples,
    with_routed_experts,
    without_routed_experts,
)


def make_sample(version: int = 3, **changes) -> Sample:
    options = {
        "prompt_id": 7,
        "group_id": 2,
        "tokens": np.array([5, 6, 7, 8], np.int32),
        "prompt_len": 2,
        "log_probs": np.array([-0.1, -1 / 3], np.float32),
        "reward": 0.1 + 0.2,
        "policy_version": version,
        "truncated": False,
    }
    return Sample(**{**options, **changes})


def make_group(number: int, version: int = 3, **changes) -> Group:
    return Group(number, 4, 0, (make_sample(version, **changes), make_sample(version + 1)), (True, False), (False,) * 2)


def assert_same(ours: Sample, theirs: Sample) -> None:
    for field in fields(Sample):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other), field.name
        else:
            assert one == other, field.name


def test_a_text_that_ended_a_response_can_be_left_out_of_training():
    plain, ended = make_sample(), make_sample(stop_tokens=1)
    masked = make_sample(stop_tokens=1, response_mask=np.array([False, True]))
    group = Group(1, 4, 0, (plain, ended, masked), (True,) * 3, (False,) * 3)
    masks = [sample.response_mask for sample in training_samples([group], mask_truncated=False)]
    assert [None if mask is None else mask.tolist() for mask in masks] == [None, [True, False], [False, False]]
    assert masked.response_mask.tolist() == [False, True]


def test_kept_tokens_are_saved_with_their_group(tmp_path):
    kept = {"kept_tokens": np.array([4, 7, 8], np.int32), "kept_counts": np.array([1, 2], np.int32)}
    save_groups(tmp_path / "groups.npz", {"shelf": [make_group(1, **kept)]})
    (found,) = load_groups(tmp_path / "groups.npz")["shelf"]
    assert_same(found.samples[0], make_sample(**kept))
    assert found.samples[0].kept[1:].tokens.tolist() == [7, 8]


def test_routed_experts_return_to_a_group_that_was_sent_without_them():
    whole = make_group(1, routed_experts=np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    sent = without_routed_experts(whole)
    assert all(sample.routed_experts is None for sample in sent.samples)
    scored = sent.with_sample(0, replace(sent.samples[0], reward=9.0), scored=True)
    found = with_routed_experts(scored, whole).samples
    assert_same(found[0], replace(whole.samples[0], reward=9.0))
    assert_same(found[1], whole.samples[1])


def test_a_file_gives_back_what_was_written(tmp_path):
    routed_experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    whole = make_group(
        1,
        response_mask=np.array([True, False]),
        routed_experts=routed_experts,
        token_versions=np.array([3, 5], np.int32),
        reference_log_probs=np.array([-0.7, -2 / 3], np.float32),
        reward_parts={"maths": 1.0, "form": -0.5},
    )
    empty = make_group(2, tokens=np.array([5, 6], np.int32), log_probs=np.zeros(0, np.float32))
    save_groups(tmp_path / "groups.npz", {"ready": [whole, empty], "replay": []})
    found = load_groups(tmp_path / "groups.npz")
    assert list(found) == ["ready", "replay"]
    assert found["replay"] == []
    for ours, theirs in zip([whole, empty], found["ready"], strict=True):
        assert (ours.number, ours.step, ours.first_sample) == (theirs.number, theirs.step, theirs.first_sample)
        assert (ours.scored, ours.dropped) == (theirs.scored, theirs.dropped)
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert_same(one, other)


def test_tool_tokens_of_a_checkpoint_that_does_not_count_them_are_counted(tmp_path):
    """A former version wrote none, and no versions of tokens."""
    group = make_group(1, response_mask=np.array([True, False]), tool_tokens=1)
    save_groups(tmp_path / "groups.npz", {"unfinished": [group]})
    with np.load(tmp_path / "groups.npz") as file:
        arrays = dict(file)
    index = json.loads(arrays["index"].tobytes())
    assert [sample.pop("tool_tokens") for sample in index["unfinished"][0]["samples"]] == [1, 0]
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    np.savez(tmp_path / "groups.npz", **arrays)
    (found,) = load_groups(tmp_path / "groups.npz")["unfinished"]
    for ours, theirs in zip(group.samples, found.samples, strict=True):
        assert_same(ours, theirs)


def test_a_group_knows_its_prompt():
    group = make_group(1)
    assert group.answers(Prompt(7, (5, 6), "", "", {}))
    assert not group.answers(Prompt(7, (5, 7), "", "", {}))
    assert not group.answers(Prompt(8, (5, 6), "", "", {}))


def test_what_a_group_says_of_its_samples():
    group = make_group(1)
    assert not group.finished
    assert group.usable == group.samples[:1]
    better = make_sample(9, reward=2.0)
    done = group.with_sample(1, better, scored=True, dropped=True)
    assert done.samples[1] is better
    first = group.with_sample(0, better, scored=False)
    assert (first.samples, first.scored, first.dropped) == ((better, group.samples[1]), (False,) * 2, (False,) * 2)
    assert done.finished
    assert done.usable == group.samples[:1]
    assert done.policy_version == 3


def test_truncated_responses_are_not_trained_on_if_masked():
    groups = [make_group(5), make_group(3, truncated=True)]
    plain, masked = (training_samples(groups, mask_truncated=mask) for mask in (False, True))
    assert [sample.group_id for sample in plain] == [0, 1], "samples that are not scored are left out"
    assert [sample.trained_len for sample in plain] == [2, 2]
    assert [sample.trained_len for sample in masked] == [2, 0]
    assert [sample.reward for sample in masked] == [sample.reward for sample in plain]


def test_the_buffer_keeps_the_newest():
    buffer = ReplayBuffer(ReplaySection(capacity=3))
    buffer.add([make_group(n) for n in (1, 2)])
    buffer.add([make_group(n) for n in (3, 4)])
    assert [group.number for group in buffer.groups] == [2, 3, 4]
    assert [group.number for group in buffer.sample(2, seed=0, step=1)] == [3, 4]


def test_stale_groups_are_forgotten():
    buffer = ReplayBuffer(ReplaySection(capacity=9, max_staleness=2), [make_group(n, version=n) for n in range(6)])
    buffer.forget_stale(6)
    assert [group.number for group in buffer.groups] == [4, 5]


@pytest.mark.parametrize("step", range(5))
def test_uniform_draws_depend_on_seed_and_step_alone(step):
    def buffer() -> ReplayBuffer:
        return ReplayBuffer(ReplaySection(capacity=50, order="uniform"), [make_group(n) for n in range(50)])

    sampled = [group.number for group in buffer().sample(10, seed=1, step=step)]
    assert sampled == [group.number for group in buffer().sample(10, seed=1, step=step)]
    assert sampled == sorted(set(sampled))
    assert sampled != [group.number for group in buffer().sample(10, seed=1, step=step + 1)]
    assert sampled != [group.number for group in buffer().sample(10, seed=2, step=step)]
