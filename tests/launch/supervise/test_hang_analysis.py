"""Who is at fault, from what the ranks say: values in, one line out."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from rlhpc.core.heartbeat import Collective, GroupState
from rlhpc.launch.supervise.hang_analysis import Frame, RankState, find_blocking_rank, parse_stacks

TORCH = Frame("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
WAITING = (TORCH, Frame("/v/lib/python3.11/site-packages/rlhpc/trainer/step.py", 40, "rl_step"))
REWARD = (
    Frame("/usr/lib/python3.11/socket.py", 7, "recv"),
    Frame("/v/lib/python3.11/site-packages/requests/api.py", 9, "get"),
    Frame("/home/u/reward.py", 12, "score"),
    Frame("/v/lib/python3.11/site-packages/rlhpc/trainer/rollout.py", 30, "generate_samples"),
)


def group(ranks, done, pending="", name="0", description="default_pg", sizes=((3,),)) -> GroupState:
    """A group that has finished ``done`` all_reduces and perhaps is in one more call."""
    calls = [Collective(number, "all_reduce", ((3,),), True) for number in range(max(1, done - 7), done + 1)]
    if pending:
        calls.append(Collective(done + 1, pending, sizes, False))
    return GroupState(name, description, "gloo", tuple(ranks), tuple(calls))


def state(rank, *groups, frames=WAITING, condition="answered", phase="train") -> RankState:
    return RankState(rank, f"node{rank // 4}", condition, phase, 5, 60.0, frames, groups)


def waiting(rank, count=8, **changes) -> RankState:
    return state(rank, group(range(count), 117, "all_reduce", **changes))


def test_a_rank_in_user_code_is_named_with_what_waits_for_it():
    states = [waiting(rank) for rank in range(8)]
    states[3] = state(3, group(range(8), 117), frames=REWARD, phase="rollout")
    found = find_blocking_rank(states)
    assert (found.rank, found.node) == (3, "node0")
    assert found.message == (
        "rank 3 on node0 is in rollout (score: /home/u/reward.py:12)"
        " while 7 ranks wait for it in all_reduce #118 of the default group"
    )


def test_two_ranks_in_user_code_are_reported_together():
    states = [waiting(rank) for rank in range(8)]
    for rank in (3, 5):
        states[rank] = state(rank, group(range(8), 117), frames=REWARD, phase="rollout")
    assert find_blocking_rank(states).message.startswith(
        "rank 3 on node0 is in rollout (score: /home/u/reward.py:12) (and 1 rank more) while 6 ranks wait for it in"
    )


def test_ranks_that_wait_for_those_who_wait_are_counted_too():
    """1 is in user code; 0 waits for it in tp; 2 and 3 wait for 0 in the default group."""
    tp = {"name": "5", "description": "TENSOR_MODEL_PARALLEL_GROUP"}
    states = [
        state(0, group(range(4), 10), group((0, 1), 20, "all_reduce", **tp)),
        state(1, group(range(4), 10), group((0, 1), 20, **tp), frames=REWARD),
        state(2, group(range(4), 10, "barrier", sizes=())),
        state(3, group(range(4), 10, "barrier", sizes=())),
    ]
    found = find_blocking_rank(states)
    assert found.rank == 1
    assert "while 3 ranks wait for it in " in found.message


def test_a_silent_rank():
    states = [waiting(rank) for rank in range(8)]
    states[6] = RankState(6, "node1", "silent", "train", 5)
    assert find_blocking_rank(states).message == (
        "rank 6 on node1 does not answer (stopped, or its node is out of reach; last seen in train)"
        " while 7 ranks wait for it in all_reduce #118 of the default group"
    )


def test_a_rank_stuck_in_native_code():
    states = [waiting(rank) for rank in range(8)]
    states[6] = RankState(6, "node1", "stuck", "train", frames=REWARD)
    assert find_blocking_rank(states).message.startswith(
        "rank 6 on node1 is stuck in native code (score: /home/u/reward.py:12; last seen in train) while 7 ranks wait"
    )


def test_a_rank_that_does_not_answer_goes_before_one_that_is_merely_late():
    states = [waiting(rank) for rank in range(8)]
    states[2] = state(2, group(range(8), 117), frames=REWARD)
    states[6] = RankState(6, "node1", "silent", "train")
    assert find_blocking_rank(states).rank == 6


def test_ranks_are_reported_together_only_where_they_are_alike():
    states = [waiting(rank) for rank in range(8)]
    states[2], states[4] = (state(rank, group(range(8), 117), frames=REWARD) for rank in (2, 4))
    states[6] = RankState(6, "node1", "silent", "train")
    assert find_blocking_rank(states).message.startswith(
        "rank 6 on node1 does not answer (stopped, or its node is out of reach; last seen in train) while 5 ranks wait"
    )


def test_a_rank_that_never_began():
    states = [state(rank, frames=WAITING, phase="join") for rank in range(8)]
    states[5] = RankState(5, condition="absent")
    assert find_blocking_rank(states) == replace(
        find_blocking_rank(states), rank=5, node="", message="rank 5 has not started"
    )


def test_a_rank_that_ended():
    states = [waiting(rank) for rank in range(8)]
    states[1] = RankState(1, "node0", "ended", "train")
    assert find_blocking_rank(states).message.startswith("rank 1 on node0 has ended while 7 ranks wait for it in")


def test_another_operation():
    states = [waiting(rank) for rank in range(8)]
    states[4] = state(4, group(range(8), 117, "broadcast"), frames=(TORCH, Frame("/home/u/algorithm.py", 3, "step")))
    assert find_blocking_rank(states).message == (
        "rank 4 on node1 calls broadcast in train (step: /home/u/algorithm.py:3)"
        " where 7 ranks call all_reduce: #118 of the default group"
    )


def test_another_size():
    states = [waiting(rank, sizes=((3,),)) for rank in range(8)]
    states[4] = waiting(4, sizes=((2, 4),))
    message = find_blocking_rank(states).message
    assert "rank 4 on node1 calls all_reduce of 2x4 in train" in message
    assert "where 7 ranks call all_reduce of 3: #118" in message


def test_sizes_may_differ_where_they_may():
    states = [state(rank, group(range(4), 9, "all_to_all", sizes=((rank + 1,),))) for rank in range(3)]
    states.append(state(3, group(range(4), 9), frames=REWARD))
    assert find_blocking_rank(states).rank == 3


def test_of_two_ranks_that_wait_for_each_other_the_one_that_left_a_collective_out():
    tp = {"description": "TENSOR_MODEL_PARALLEL_GROUP"}
    states = [
        state(0, group(range(4), 10), group((0, 1), 3, "all_reduce", name="5", **tp)),
        state(1, group(range(4), 10, "barrier", sizes=()), group((0, 1), 3, name="5", **tp)),
        state(2, group(range(4), 10, "barrier", sizes=()), group((2, 3), 4, name="6", **tp)),
        state(3, group(range(4), 10, "barrier", sizes=()), group((2, 3), 4, name="6", **tp)),
    ]
    assert find_blocking_rank(states).message == (
        "rank 1 on node0 waits in barrier #11 of the default group in train"
        f" ({WAITING[1]}) after 3 collectives of group TENSOR_MODEL_PARALLEL_GROUP where 2 ranks got there after 4"
    )


def test_of_ranks_that_wait_for_each_other_the_one_that_most_wait_for():
    """0 waits for 1 in tp, 1 and 2 wait for 0 in the default group: nothing but that shows them apart."""
    states = [
        state(0, group(range(3), 10), group((0, 1), 3, "all_reduce", name="5", description="")),
        state(1, group(range(3), 10, "barrier", sizes=()), group((0, 1), 3, name="5", description="")),
        state(2, group(range(3), 10, "barrier", sizes=())),
    ]
    assert find_blocking_rank(states).message == (
        f"rank 0 on node0 waits in all_reduce #4 of group 5 in train ({WAITING[1]})"
        " while 2 ranks wait for it in barrier #11 of the default group"
    )
    states[1] = replace(states[1], frames=REWARD)
    assert find_blocking_rank(states).message == (
        "rank 1 on node0 is in train (score: /home/u/reward.py:12) while 1 rank waits for it in all_reduce #4"
        " of group 5"
    )


def test_engines_may_have_taken_different_numbers_of_steps():
    """Groups without a description are not compared by number."""
    states = [
        state(0, group(range(4), 10, "barrier", sizes=()), group((0, 1), 300, name="8", description="")),
        state(1, group(range(4), 10, "barrier", sizes=()), group((0, 1), 300, name="8", description="")),
        state(2, group(range(4), 10, "barrier", sizes=()), group((2, 3), 250, name="9", description="")),
        state(3, group(range(4), 10), group((2, 3), 250, name="9", description=""), frames=REWARD),
    ]
    assert find_blocking_rank(states).rank == 3


def test_an_overlapped_collective_in_flight_does_not_excuse_a_rank_in_user_code():
    """1 has started an asynchronous call in dp and sleeps; 0 waits for it in tp, and so never reaches dp."""
    dp = {"name": "7", "description": "DATA_PARALLEL_GROUP"}
    states = [
        state(0, group((0, 1), 8, **dp), group((0, 1), 3, "all_reduce")),
        state(1, group((0, 1), 8, "reduce_scatter", **dp), group((0, 1), 3), frames=REWARD),
    ]
    assert find_blocking_rank(states).message.startswith(
        "rank 1 on node0 is in train (score: /home/u/reward.py:12) while 1 rank waits for it in all_reduce #4"
    )


def test_ranks_that_meet_in_the_store_wait_for_one_that_does_not_come():
    meeting = (
        Frame("/v/lib/python3.11/site-packages/rlhpc/core/store_client.py", 9, "_receive"),
        Frame("/v/lib/python3.11/site-packages/rlhpc/parallel/store.py", 8, "_call"),
        Frame("/v/lib/python3.11/site-packages/rlhpc/parallel/groups.py", 29, "join"),
    )
    states = [state(rank, frames=meeting, phase="join") for rank in range(4)]
    states[2] = state(2, frames=REWARD, phase="join")
    assert (
        find_blocking_rank(states).message
        == "rank 2 on node0 is in join (score: /home/u/reward.py:12) while 3 ranks wait"
    )
    assert str(states[0].own_frame).startswith("join: ")


def test_a_rank_alone():
    found = find_blocking_rank([state(0, frames=REWARD, phase="rollout")])
    assert found.message == "rank 0 on node0 is in rollout (score: /home/u/reward.py:12)"


def test_when_all_do_the_same_nobody_is_named():
    found = find_blocking_rank([state(rank, frames=REWARD, phase="rollout") for rank in range(4)])
    assert found.rank == -1
    assert found.message.startswith("no rank stands out: rank 0 on node0 is in rollout (score: ")


def test_nobody_answers():
    found = find_blocking_rank([RankState(rank, "node0", "silent", "train") for rank in range(4)])
    assert found.rank == 0
    assert found.message.endswith("; 3 ranks more like it")


@pytest.mark.heavy
def test_thousands_of_ranks_take_seconds_not_minutes():
    count = 5000
    everyone = tuple(range(count))
    rest = [
        state(rank, GroupState("0", "default_pg", "nccl", everyone, waiting(0).groups[0].recent)) for rank in everyone
    ]
    rest[77] = state(
        77, GroupState("0", "default_pg", "nccl", everyone, waiting(0).groups[0].recent[:-1]), frames=REWARD
    )
    began = time.process_time()
    assert find_blocking_rank(rest).rank == 77
    for rank in range(0, count, 2):  # half of all
        rest[rank] = replace(rest[77], rank=rank)
    assert find_blocking_rank(rest).rank == 0
    assert time.process_time() - began < 6


STACKS = """Timeout (0:00:02)!
Thread 0x00007f72995f76c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007f729ac41b80 (most recent call first):
  File "/home/u/my reward.py", line 43 in score
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_main_threads_frames_are_read():
    frames = parse_stacks(STACKS, 0x7F729AC41B80)
    assert frames == (Frame("/home/u/my reward.py", 43, "score"), Frame("<frozen runpy>", 88, "_run_code"))
    assert parse_stacks(STACKS, 0x7F72995F76C0)[0].function == "wait"
    assert parse_stacks("Stack (most recent call first):\n" + STACKS.split("\n", 5)[5], 0x7F729AC41B80) == frames
    assert parse_stacks("", 0) == ()


def test_of_two_dumps_the_newer_counts():
    newer = STACKS + STACKS.replace("line 43 in score", "line 44 in score")
    assert parse_stacks(newer, 0x7F729AC41B80)[0].line == 44


def test_own_frames_are_the_users_and_ours():
    own = [frame.function for frame in (*REWARD, *WAITING) if frame.is_own]
    assert own == ["score", "generate_samples", "rl_step"]
    assert not Frame("<frozen runpy>", 88, "_run_code").is_own
    assert not Frame("/usr/lib/python3.11/threading.py", 3, "wait").is_own
