"""Who is at fault in a job with roles: four trainers (ranks 0 to 3) and two engines of two ranks (4 to 7)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhpc.core.heartbeat import Collective, GroupState
from rlhpc.launch.supervise.hang_analysis import Frame, RankState, find_blocking_role
from rlhpc.launch.supervise.hang_watch import report_text
from rlhpc.sharding.placement import Placement, RoleWorld

PACKAGE = "/v/lib/python3.11/site-packages/"
PLACEMENT = Placement((RoleWorld("trainers", 0, 4), RoleWorld("engines", 4, 4)), tp=2)
COLLECTIVE = (
    Frame(f"{PACKAGE}torch/distributed/distributed_c10d.py", 3252, "broadcast"),
    Frame(f"{PACKAGE}rlhpc/trainer/separate.py", 70, "_share"),
)
BATCH = (
    Frame("/usr/lib/python3.11/threading.py", 331, "wait"),
    Frame(f"{PACKAGE}rlhpc/parallel/channel.py", 60, "wait"),
    Frame(f"{PACKAGE}rlhpc/trainer/separate.py", 40, "take_batch"),
)
WEIGHTS = (
    Frame("/usr/lib/python3.11/threading.py", 331, "wait"),
    Frame(f"{PACKAGE}rlhpc/reshard/staged/target.py", 9, "wait"),
    Frame(f"{PACKAGE}rlhpc/rollout/generator/loop.py", 12, "_switch"),
)
NEWS = (
    Frame(f"{PACKAGE}rlhpc/parallel/board.py", 50, "wait_for"),
    Frame(f"{PACKAGE}rlhpc/rollout/generator/loop.py", 33, "_news"),
)
REWARD = (
    Frame("/home/u/reward.py", 12, "score"),
    Frame(f"{PACKAGE}rlhpc/rollout/generator/loop.py", 90, "run"),
)


def group(ranks, *, pending: bool, name="0") -> GroupState:
    calls = (Collective(1, "broadcast", ((3,),), True),) + ((Collective(2, "broadcast", ((3,),), False),) * pending)
    return GroupState(name, "default_pg" if name == "0" else f"engine {name}", "gloo", tuple(ranks), calls)


def state(rank, frames, *groups, condition="answered", phase="rollout") -> RankState:
    return RankState(rank, f"node{rank // 4}", condition, phase, 5, 60.0, frames, groups, PLACEMENT.label(rank))


def trainers_wait() -> list[RankState]:
    """Rank 0 waits for the engines, and the others for rank 0."""
    everyone = range(4)
    first = state(0, BATCH, replace(group(everyone, pending=False), group="t"))
    return [first, *(state(r, COLLECTIVE, replace(group(everyone, pending=True), group="t")) for r in (1, 2, 3))]


def engine(number, frames) -> list[RankState]:
    """An engine whose second rank waits for its first."""
    first = 4 + 2 * number
    ranks, name = (first, first + 1), f"e{number}"
    leader = state(first, frames, group(ranks, pending=False, name=name))
    return [leader, state(first + 1, COLLECTIVE, group(ranks, pending=True, name=name))]


def test_trainers_that_wait_for_an_engine_are_not_blamed():
    """Rank 4 waits for the other engine's news."""
    found = find_blocking_role([*trainers_wait(), *engine(0, NEWS), *engine(1, REWARD)])
    assert (found.rank, found.node) == (6, "node1")
    assert found.message == (
        "rank 6 (engine 1) on node1 is in rollout (score: /home/u/reward.py:12) while 1 rank waits for it in broadcast "
        "#2 of group engine e1; the trainers wait for the engines"
    )


@pytest.mark.parametrize(("phase", "blocking"), [("waiting for engines", 6), ("waiting for rewards", 4)])
def test_an_engine_that_polls_waits_for_what_its_phase_says(phase, blocking):
    """Between two looks it may be anywhere in its loop. Rewards and tools are its own."""
    polling = (Frame(f"{PACKAGE}rlhpc/rollout/schedule/engine_schedule.py", 5, "next"),)
    engines = [*engine(0, polling), *engine(1, REWARD)]
    engines[0] = replace(engines[0], phase=phase)
    found = find_blocking_role([*trainers_wait(), *engines])
    assert found.rank == blocking


def test_engines_that_wait_for_the_plan_of_the_weights_are_not_blamed():
    """The trainers, whose first rank posts it, have not come so far."""
    plan = (
        Frame(f"{PACKAGE}rlhpc/parallel/store.py", 84, "wait"),
        Frame(f"{PACKAGE}rlhpc/reshard/staged/job.py", 80, "arrived"),
    )
    engines = [state(rank, plan, phase="waiting for trainers") for rank in range(4, 8)]
    trainers = [state(rank, REWARD, phase="starting reward workers") for rank in range(4)]
    assert find_blocking_role([*trainers, *engines]).message.endswith("; the engines wait for the trainers")


def test_an_engine_waits_for_its_own_rewards():
    waiting = (Frame(f"{PACKAGE}rlhpc/rollout/generator/lead.py", 5, "_wait"),)
    engines = [*engine(0, waiting), *engine(1, NEWS)]
    engines[0] = replace(engines[0], phase="waiting for rewards")
    assert find_blocking_role([*trainers_wait(), *engines]).rank == 4


LENT = (
    Frame("/usr/lib/python3.11/threading.py", 331, "wait"),
    Frame(f"{PACKAGE}rlhpc/parallel/channel.py", 60, "wait"),
    Frame(f"{PACKAGE}rlhpc/trainer/lending.py", 46, "_look"),
)


def test_trainers_that_wait_for_requests_to_continue_are_not_blamed():
    """Ranks 0 and 1 have continued theirs, and wait for ranks 2 and 3, which have got none."""
    everyone = range(4)
    trainers = [state(r, COLLECTIVE, replace(group(everyone, pending=True), group="t")) for r in (0, 1)]
    idle = replace(group(everyone, pending=False), group="t")
    trainers += [state(r, LENT, idle, phase="waiting for engines") for r in (2, 3)]
    found = find_blocking_role([*trainers, *engine(0, NEWS), *engine(1, REWARD)])
    assert found.rank == 6
    assert found.message.endswith("; the trainers wait for the engines")


def test_a_trainer_s_rank_that_does_not_return_requests_is_blamed():
    everyone = range(4)
    trainers = [state(r, COLLECTIVE, replace(group(everyone, pending=True), group="t")) for r in (0, 1, 3)]
    stuck = (
        Frame(f"{PACKAGE}vllm/v1/engine/llm_engine.py", 9, "step"),
        Frame(f"{PACKAGE}rlhpc/rollout/vllm_engine.py", 102, "step"),
    )
    trainers.insert(2, state(2, stuck, replace(group(everyone, pending=False), group="t"), phase="generate"))
    waiting = (Frame(f"{PACKAGE}rlhpc/rollout/generator/lead.py", 270, "_pause"),)
    engines = [*engine(0, waiting), *engine(1, waiting)]
    engines = [replace(one, phase="waiting for trainers") for one in engines]
    found = find_blocking_role([*trainers, *engines])
    assert found.rank == 2
    assert found.message.endswith("; the engines wait for the trainers")


def test_engines_that_wait_for_weights_are_not_blamed():
    everyone = replace(group(range(4), pending=True), group="t")
    states = [state(rank, COLLECTIVE, everyone, phase="update") for rank in range(4)]
    states[2] = state(2, REWARD, replace(group(range(4), pending=False), group="t"), phase="update")
    found = find_blocking_role([*states, *engine(0, WEIGHTS), *engine(1, WEIGHTS)])
    assert found.rank == 2
    assert found.message.startswith(
        "rank 2 (trainer) on node0 is in update (score: /home/u/reward.py:12) while 3 ranks"
    )
    assert found.message.endswith("; the engines wait for the trainers")


@pytest.mark.parametrize("condition", ["silent", "stuck", "absent", "ended"])
def test_an_engine_that_does_not_answer(condition):
    states = [*trainers_wait(), *engine(0, NEWS), *engine(1, NEWS)]
    states[6] = state(6, (), condition=condition)
    assert find_blocking_role(states).rank == 6


def test_an_engine_of_one_rank_in_user_code():
    """Nobody waits for it in a collective."""
    alone = Placement((RoleWorld("trainers", 0, 4), RoleWorld("engines", 4, 2)), tp=1)
    engines = [state(4, NEWS), state(5, REWARD)]
    engines = [replace(one, role=alone.label(one.rank)) for one in engines]
    found = find_blocking_role([*trainers_wait(), *engines])
    assert (found.rank, "rank 5 (engine 1) on node1" in found.message) == (5, True)


def test_roles_that_wait_for_each_other():
    found = find_blocking_role([*trainers_wait(), *engine(0, WEIGHTS), *engine(1, WEIGHTS)])
    assert found.rank == -1
    assert "rank 0 (trainer) on node0" in found.message
    assert "rank 4 (engine 0) on node1" in found.message
    assert "take_batch" in found.message  # rlhpc's own frame, not the channel's


def test_of_two_roles_that_both_stand_still_one_that_does_not_answer_is_named():
    everyone = replace(group(range(4), pending=True), group="t")
    states = [state(rank, COLLECTIVE, everyone, phase="update") for rank in range(4)]
    states[2] = state(2, REWARD, replace(group(range(4), pending=False), group="t"), phase="update")
    engines = [*engine(0, NEWS), *engine(1, NEWS)]
    engines[2] = state(6, (), condition="silent")
    assert find_blocking_role([*states, *engines]).rank == 6


def test_the_report_has_the_roles(tmp_path):
    states = [*trainers_wait(), *engine(0, NEWS), *engine(1, REWARD)]
    lines = report_text(find_blocking_role(states), states, 60, "", tmp_path).splitlines()
    assert next(line for line in lines if line.startswith("rank  ")).split()[:3] == ["rank", "role", "node"]
    assert next(line for line in lines if line.startswith("6 ")).split()[1:4] == ["engine", "1", "node1"]
    alike = [replace(one, role="") for one in states]
    assert " role " not in report_text(find_blocking_role(alike), alike, 60, "", tmp_path)


def test_a_judge_that_blocks_trainers_and_engines_is_found():
    """Ranks 0 and 1 train, 2 and 3 judge, 4 to 7 generate; rank 3 is stuck before its collective with rank 2."""
    placement = Placement((RoleWorld("trainers", 0, 2), RoleWorld("judges", 2, 2), RoleWorld("engines", 4, 4)), tp=2)
    stuck = (Frame(f"{PACKAGE}rlhpc/trainer/reward_model.py", 80, "scores_of"),)
    answer = (BATCH[0], BATCH[1], Frame(f"{PACKAGE}rlhpc/trainer/judge_side.py", 150, "_wait_for_answer"))
    groups = {"t": (0, 1), "j": (2, 3)}

    def of(rank, frames, name, *, pending):
        return replace(
            state(rank, frames, replace(group(groups[name], pending=pending), group=name)), role=placement.label(rank)
        )

    trainers = [of(0, answer, "t", pending=False), of(1, COLLECTIVE, "t", pending=True)]
    judges = [of(2, COLLECTIVE, "j", pending=True), of(3, stuck, "j", pending=False)]
    found = find_blocking_role([*trainers, *judges, *engine(0, WEIGHTS), *engine(1, WEIGHTS)])
    assert (found.rank, found.message.partition(" on ")[0]) == (3, "rank 3 (judge)")
    assert found.message.endswith("; the trainers and the engines wait for the judges")
    idle = (BATCH[0], BATCH[1], Frame(f"{PACKAGE}rlhpc/trainer/judge_loop.py", 190, "_look"))
    judges = [of(2, idle, "j", pending=False), of(3, COLLECTIVE, "j", pending=True)]
    engines = [*engine(0, NEWS), *engine(1, REWARD)]
    assert find_blocking_role([*trainers_wait()[:1], *judges, *engines]).rank == 6
