"""The policy: bounded, by cause, from the config."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.attempts import Attempt, Verdict
from rlhpc.launch.supervise.diagnosis import Diagnosis
from rlhpc.launch.supervise.policy import Situation, decide, shrink, storage_patience

ATTEMPT = Attempt(3, "17", 0, ("node1", "node2"), 4, 900.0, saved_step=20)


@pytest.fixture
def config(tmp_path):
    def make(*overrides: str):
        file = tmp_path / "given.yaml"
        file.write_text("name: tiny\nmodel: {path: none}\ntrain: {steps: 1}\nslurm: {nodes: 2}\n")
        return load_config(file, overrides)

    return make


def situation(**changes) -> Situation:
    known = Situation(ATTEMPT, None, saved_step=20, now=1000.0, seconds_left=3600.0, usable_without=0)
    return replace(known, **changes)


def failed(cause, failures: int, node: str = "") -> Verdict:
    return Verdict(800.0, cause, "before", "retry", node=node, failures=failures)


@pytest.mark.parametrize("cause", ["user", "data"])
def test_what_would_fail_again_stops_at_once(config, cause):
    assert decide(Diagnosis(cause, "bad"), config(), situation()).action == "stop"


def test_steps_that_are_not_finite_are_repeated_only_where_the_config_asks_for_it(config):
    diverged = Diagnosis("non_finite", "rl step 3: …")
    assert decide(diverged, config(), situation()).action == "stop"
    assert decide(diverged, config("recovery.non_finite=retry"), situation()).action == "retry"


def test_strangers_end_the_run(config):
    met = Diagnosis("stranger", "1 connection to 10.0.0.1:5000 …")
    assert decide(met, config(), situation()).action == "stop"


@pytest.mark.parametrize("cause", ["network", "hang", "disk_full", "storage", "crash", "launch"])
def test_others_are_tried_again_after_the_configured_wait(config, cause):
    verdict = decide(Diagnosis(cause, "bad", 1, "node1"), config("recovery.wait_seconds=30"), situation())
    assert (verdict.action, verdict.wait_seconds, verdict.failures) == ("retry", 30.0, 1)


def test_network_and_disk_wait_twice_as_long_each_time(config):
    for cause, wait in (("network", 480.0), ("disk_full", 480.0), ("storage", 480.0), ("crash", 120.0)):
        assert decide(Diagnosis(cause), config(), situation(before=failed(cause, 2))).wait_seconds == wait


def test_a_launcher_waits_for_the_file_system_as_long_as_retries_would_take(config):
    recovery = config("recovery.retries=3", "recovery.wait_seconds=10", "recovery.storage_wait_seconds=60").recovery
    assert storage_patience(recovery) == 60 + 10 + 20 + 40
    assert storage_patience(recovery.model_copy(update={"storage": "stop"})) == 60


def test_the_number_of_failures_in_a_row_is_bounded(config):
    fifth = decide(Diagnosis("crash", "again"), config(), situation(before=failed("network", 4)))
    sixth = decide(Diagnosis("crash", "again"), config(), situation(before=fifth))
    assert (fifth.action, fifth.failures) == ("retry", 5)
    assert sixth.action == "stop"
    assert "6 attempts in a row without a newer checkpoint" in sixth.message


def test_a_newer_checkpoint_restarts_the_count(config):
    verdict = decide(Diagnosis("crash"), config(), situation(before=failed("crash", 5), saved_step=21))
    assert (verdict.action, verdict.failures) == ("retry", 1)


@pytest.mark.parametrize("cause", ["time_limit", "preempted", "requeued"])
def test_pauses_go_back_into_the_queue_and_count_only_without_progress(config, cause):
    with_progress = decide(Diagnosis(cause), config(), situation(before=failed("crash", 3), saved_step=21))
    without = decide(Diagnosis(cause), config(), situation(before=failed("crash", 3)))
    assert (with_progress.action, with_progress.failures) == ("requeue", 0)
    assert (without.action, without.failures) == ("requeue", 4)
    assert decide(Diagnosis(cause), config(), situation(before=failed(cause, 5))).action == "stop"


def test_a_lost_allocation_uses_up_no_attempt(config):
    lost = Diagnosis("allocation_lost", "Slurm has returned the job to the queue")
    fifth = decide(lost, config(), situation(before=failed("crash", 5)))
    assert (fifth.action, fifth.failures) == ("none", 5)
    assert decide(lost, config("recovery.crash=stop"), situation()).action == "none"


def test_memory_is_answered_by_half_the_tokens_down_to_one_sequence(config):
    given = config(
        "data.max_prompt_tokens=1000", "rollout.max_response_tokens=1000", "train.tokens_per_microbatch=5000"
    )
    first = decide(Diagnosis("gpu_memory"), given, situation())
    assert (first.action, first.overrides) == ("retry", ("train.tokens_per_microbatch=2500",))
    smaller = config("data.max_prompt_tokens=1000", "rollout.max_response_tokens=1000", *first.overrides)
    again = replace(ATTEMPT, overrides=("seed=3", *first.overrides))
    second = decide(Diagnosis("gpu_memory"), smaller, situation(attempt=again, before=first))
    assert second.overrides == ("seed=3", "train.tokens_per_microbatch=2000")
    smallest = config(
        "data.max_prompt_tokens=1000", "rollout.max_response_tokens=1000", "train.tokens_per_microbatch=2000"
    )
    third = decide(Diagnosis("gpu_memory", "out of memory"), smallest, situation(before=second))
    assert (third.action, third.message) == ("stop", "out of memory (cannot be halved further)")


def test_memory_of_the_engine_is_answered_by_fewer_sequences(config):
    traceback = 'File "/x/vllm/v1/worker/gpu_model_runner.py", line 3'
    assert shrink(config(), Diagnosis("gpu_memory", detail=traceback), 4) == "rollout.max_num_seqs=128"


def test_a_rank_that_only_generates_runs_fewer_sequences(config):
    roles = config("placement=separate", "resources.ranks_per_node=2", "rollout.ranks=1")
    tokens, sequences = "train.tokens_per_microbatch=8192", "rollout.max_num_seqs=128"
    found = [shrink(roles, Diagnosis("cpu_memory", rank=rank), 4) for rank in (0, 2, 3)]
    assert found == [tokens, tokens, sequences]
    assert shrink(config(), Diagnosis("cpu_memory", rank=3), 4) == tokens


def test_a_bad_node_is_left_out(config):
    bad = Diagnosis("bad_node", "ECC", 3, "node2")
    rest = decide(bad, config(), situation(usable_without=1))
    assert (rest.action, rest.excluded) == ("retry", ("node2",))
    nothing_left = decide(bad, config(), situation())
    assert (nothing_left.action, nothing_left.excluded) == ("requeue", ("node2",))
    launcher_s = decide(Diagnosis("bad_node", "ECC", 0, "node1"), config(), situation(usable_without=1))
    assert launcher_s.action == "requeue"


def test_a_node_that_nothing_can_replace_is_not_left_out(config):
    """The job would wait forever: it wants two nodes, and the partition has no third."""
    bad = Diagnosis("bad_node", "ECC", 3, "node2")
    verdict = decide(bad, config(), situation(partition=("node1", "node2")))
    assert (verdict.action, verdict.excluded) == ("requeue", ())
    assert verdict.message == "ECC (no other node can replace it)"
    waits = config().recovery.wait_seconds
    assert verdict.wait_seconds == waits
    again = decide(bad, config(), situation(partition=("node1", "node2"), before=replace(verdict, failures=2)))
    assert again.wait_seconds == 4 * waits, "it may come back: each pause is twice as long"
    assert decide(bad, config(), situation(partition=("node1", "node2", "node3"))).excluded == ("node2",)


def unreachable(node: str, store: str = "node1") -> Diagnosis:
    return Diagnosis("bad_node", f"node {node}: the job's store at {store}:20017 (10.0.0.1): no connection", 1, node)


def test_the_first_node_is_left_out_if_two_others_in_a_row_cannot_reach_its_store(config):
    first = decide(unreachable("node2"), config(), situation())
    assert (first.node, first.excluded) == ("node2", ("node2",))
    now = situation(attempt=replace(ATTEMPT, nodes=("node1", "node3"), excluded=("node2",)), before=first)
    second = decide(unreachable("node3"), config(), now)
    assert (second.node, second.rank, second.action) == ("node1", -1, "requeue")
    assert second.excluded == ("node1", "node2")
    assert second.message.startswith("node2 and node3 cannot reach node1: node node3: the job's store at node1:20017")


def test_the_store_of_another_first_node_is_not_to_blame(config):
    first = decide(unreachable("node2"), config(), situation())
    now = situation(attempt=replace(ATTEMPT, nodes=("node4", "node3"), excluded=("node2",)), before=first)
    assert decide(unreachable("node3", "node4"), config(), now).node == "node3"


def test_a_node_on_which_ranks_die_twice_in_a_row_is_left_out(config):
    died = Diagnosis("crash", "Killed", 3, "node2")
    first = decide(died, config(), situation())
    assert (first.cause, first.excluded) == ("crash", ())
    second = decide(died, config(), situation(before=first))
    assert (second.cause, second.excluded) == ("bad_node", ("node2",))
    elsewhere = decide(replace(died, node="node1"), config(), situation(before=first))
    assert elsewhere.cause == "crash"


def test_what_the_config_forbids_is_not_done(config):
    assert decide(Diagnosis("network"), config("recovery.network=stop"), situation()).action == "stop"
    assert decide(Diagnosis("gpu_memory"), config("recovery.out_of_memory=stop"), situation()).action == "stop"


def test_too_little_time_for_a_retry_is_the_queue_s(config):
    assert decide(Diagnosis("crash"), config(), situation(seconds_left=100.0)).action == "requeue"


@pytest.mark.parametrize(("reason", "action"), [("alert", "stop"), ("asked", "none"), ("deadline", "none")])
def test_a_stop_by_an_alert_is_final(config, reason, action):
    stopped = Diagnosis("stopped", "checkpointed and ended by alert kl: high", stopped=reason)
    assert decide(stopped, config(), situation()).action == action
