"""Plausible faults in rlhpc, which ``tests.tiers.faults`` plants one at a time to find the test that fails.

At least one per room, more where faults cost most: training mathematics, weight sync, checkpoints, recovery, rewards
and their sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One or two wrong lines: ``new`` in place of ``old``, which occurs exactly once in ``file``."""

    name: str
    file: str
    breaks: str  # effect on a user
    old: str
    new: str

    def planted(self, text: str) -> str:
        """``text`` of the file with the fault. Raises ValueError unless the line occurs exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: {self.old.strip()!r} occurs {count} times in {self.file}, not once;"
                " update the fault in tests/tiers/planted.py"
            )
        return text.replace(self.old, self.new)


FAULTS = (
    Fault(
        "fence-one-attempt-late",
        "rlhpc/core/folder.py",
        "ranks of a superseded attempt keep writing into the run folder beside the new attempt",
        "self.run.attempt(self.number + 1)",
        "self.run.attempt(self.number + 2)",
    ),
    Fault(
        "first-victim-blamed",
        "rlhpc/core/exits.py",
        "a rank that only lost its connection is reported as the cause, not the rank that failed",
        'return first("user") or first("signal", "error") or first("peer")',
        'return first("user") or first("signal", "error", "peer")',
    ),
    Fault(
        "defaults-over-the-config",
        "rlhpc/config/algorithm.py",
        "an algorithm's defaults replace the values that the user has set",
        'merged = {**DEFAULTS.get(data["name"], {}), **data}',
        'merged = {**data, **DEFAULTS.get(data["name"], {})}',
    ),
    Fault(
        "mixtral-gate-and-up-swapped",
        "rlhpc/models/mixtral.py",
        "Mixtral's experts compute with gate and up exchanged: wrong outputs of a model that loads without an error",
        '("w1", "w3", "w2")',
        '("w3", "w1", "w2")',
    ),
    Fault(
        "optimizer-range-one-row-late",
        "rlhpc/sharding/flat_ranges.py",
        "a checkpoint has moments and master weights of partial rows in the wrong row",
        "found = _inside(first - 1, flat_boxes(rows, start % size, size)) if start % size else []",
        "found = _inside(first, flat_boxes(rows, start % size, size)) if start % size else []",
    ),
    Fault(
        "key-heads-not-repeated",
        "rlhpc/sharding/engine_shards.py",
        "with more engine ranks than key-value heads, ranks get rows that are not those of their heads",
        "first = rank * queries if part == 0 else rank * shape.num_kv_heads // tp",
        "first = rank * queries if part == 0 else rank * keys",
    ),
    Fault(
        "kl-sign",
        "rlhpc/algo/objective.py",
        "the KL term drives the policy away from the reference model",
        'loss = loss + section.kl.coefficient * sums["kl"]',
        'loss = loss - section.kl.coefficient * sums["kl"]',
    ),
    Fault(
        "returns-cross-responses",
        "rlhpc/algo/ragged.py",
        "returns and GAE of a response include the rewards of the responses after it",
        "decay[lengths.cumsum(0)[lengths > 0] - 1] = 0.0  # rows do not mix",
        "decay[-1:] = 0.0",
    ),
    Fault(
        "tool-tokens-in-the-denominator",
        "rlhpc/api/types.py",
        "tokens of tool answers count in the mean of the loss, so that long answers dilute the gradient",
        "return self.response_len if self.response_mask is None else int(self.response_mask.sum())",
        "return self.response_len",
    ),
    Fault(
        "long-groups-too-old",
        "rlhpc/trainer/sampling_plan.py",
        "steps do not wait for groups that take long, which become too stale and are dropped: a run learns to be short",
        "return any(self.staleness.get(number, 0) + step > most for number, step in zip(left, steps, strict=True))",
        "return False",
    ),
    Fault(
        "replayed-compared-as-fresh",
        "rlhpc/trainer/update.py",
        "engine and trainer seem to differ in every step with replay, up to the error of reshard.max_logprob_diff",
        "sample.policy_version == state.policy_version",
        "sample.policy_version <= state.policy_version",
    ),
    Fault(
        "icepop-without-lower-bound",
        "rlhpc/algo/rollout_correction.py",
        "the policy trains on tokens that it finds far less likely than the engine did, which IcePop leaves out",
        "outside = above | (ratio < section.low)",
        "outside = above",
    ),
    Fault(
        "values-through-tool-tokens",
        "rlhpc/algo/advantages.py",
        "the advantage of a turn's last token is bootstrapped from the critic's value of a tool's token, which is 0",
        "(~own).to(values.dtype)",
        "torch.zeros_like(values)",
    ),
    Fault(
        "store-secret-inherited",
        "rlhpc/parallel/store.py",
        "the job's secret stays in the environment of ranks, and reward functions and their programs inherit it",
        'environ.pop(env.RLHPC_STORE_SECRET, "")',
        'environ.get(env.RLHPC_STORE_SECRET, "")',
    ),
    Fault(
        "secrets-in-tracebacks",
        "rlhpc/core/exits.py",
        "an error whose message has an API key leaves it in the exit record of its rank, which users share for help",
        "redact(_traceback(error)), redact(str(error))",
        "_traceback(error), str(error)",
    ),
    Fault(
        "secrets-in-the-saved-config",
        "rlhpc/config/saved.py",
        "config.yaml of run folder and attempts has the API keys of the configuration",
        "yaml12.dump(shown)",
        'yaml12.dump(config.model_dump(mode="json"))',
    ),
    Fault(
        "tool-answers-trained-on",
        "rlhpc/data/collate.py",
        "the policy is trained to produce what tools answered",
        "[np.ones(n) if own is None else own for own, n in zip(response_mask, spans.response_lengths, strict=True)]",
        "[np.ones(n) for n in spans.response_lengths]",
    ),
    Fault(
        "hidden-communication-counted-as-exposed",
        "rlhpc/observe/profiles/table.py",
        "the table of a trace blames communication that computation hides",
        "total - hidden)",
        "total)",
    ),
    Fault(
        "biased-pass-at-k",
        "rlhpc/observe/evaluation.py",
        "pass@k is estimated with replacement, and too low",
        "return 1.0 - comb(count - correct, n) / comb(count, n)",
        "return 1.0 - (1.0 - correct / count) ** n",
    ),
    Fault(
        "page-without-the-least-values",
        "rlhpc/observe/page/curves.py",
        "curves of long runs on the page lack their drops, such as a collapse of a few steps",
        "sorted({begin + inside.index(min(finite)), begin + inside.index(max(finite))})",
        "sorted({begin + inside.index(max(finite))})",
    ),
    Fault(
        "alert-in-every-step",
        "rlhpc/observe/alerts/engine.py",
        "an alert is sent in every step while its condition holds, not once per episode",
        'return message if begins else ""',
        "return message",
    ),
    Fault(
        "last-step-of-the-warm-up-hidden",
        "rlhpc/observe/trackers/event_files.py",
        "TensorBoard lacks the last step of the warm-up after the process that feeds it was started again",
        "points = [*self._repeated, *points]",
        "points = [*points]",
    ),
    Fault(
        "reward-weights-ignored",
        "rlhpc/rewards/reward_workers.py",
        "reward functions count alike, regardless of their weights",
        "reward += function.weight * outcome.value",
        "reward += outcome.value",
    ),
    Fault(
        "sandbox-with-network",
        "rlhpc/rewards/kernel.py",
        "programs in responses reach the cluster's network",
        "_CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC",
        "_CLONE_NEWPID | _CLONE_NEWIPC",
    ),
    Fault(
        "weight-decay-on-norms",
        "rlhpc/backends/megatron/optimizer.py",
        "weight decay shrinks norms and biases too",
        'weight_decay * group.get("wd_mult", 1.0)',
        "weight_decay",
    ),
    Fault(
        "entropy-of-a-cut-vocabulary",
        "rlhpc/backends/megatron/log_probs.py",
        "with tensor parallelism, entropy and its gradient mix terms relative to different maxima",
        "weighted, total = shift.exp() * (weighted + shift * total), shift.exp() * total",
        "weighted, total = shift.exp() * weighted, shift.exp() * total",
    ),
    Fault(
        "context-mask-top-left",
        "rlhpc/backends/megatron/segments.py",
        "with context parallelism, queries of late chunks do not see the keys just before them",
        "last_seen = query_column + keys - queries",
        "last_seen = query_column + 0 * keys",
    ),
    Fault(
        "critic-gradient-summed-over-tp",
        "rlhpc/backends/megatron/value_head.py",
        "with sequence parallelism, the critic's gradients are tp times too large",
        "tensor_parallel_output_grad=False",
        "tensor_parallel_output_grad=True",
    ),
    Fault(
        "stale-prefix-cache",
        "rlhpc/rollout/vllm_engine.py",
        "after a weight sync, responses are generated from cached prefixes of the old weights",
        '        assert self._engine.reset_prefix_cache(), "requests still use cached prefixes of the old weights"\n',
        "",
    ),
    Fault(
        "last-bucket-not-packed",
        "rlhpc/reshard/executor.py",
        "the last bucket of a weight sync is sent with the bytes of an earlier one",
        "            if bucket + 1 < buckets:\n",
        "            if bucket + 2 < buckets:\n",
    ),
    Fault(
        "partial-differences-accepted",
        "rlhpc/reshard/verify.py",
        "the check after a weight sync reports nothing unless every weight differs",
        "torch.cat([wrong for _, wrong in found]).any()",
        "torch.cat([wrong for _, wrong in found]).all()",
    ),
    Fault(
        "cut-checkpoint-accepted",
        "rlhpc/checkpoint/store.py",
        "a run resumes from a checkpoint of which files are missing or cut short",
        "            if not damaged:\n",
        "            if _STATE not in damaged:\n",
    ),
    Fault(
        "state-of-a-later-step",
        "rlhpc/checkpoint/store.py",
        "a checkpoint saved in the background has the counters of a later step than its weights",
        "_Open(writing, final, replace(state), ",
        "_Open(writing, final, state, ",
    ),
    Fault(
        "reference-not-copied",
        "rlhpc/trainer/loop.py",
        "after a supervised warm-up, the KL term pulls the policy back to the model before it",
        "                run.reference.copy_weights(run.actor)\n",
        "",
    ),
    Fault(
        "leftover-groups-not-saved",
        "rlhpc/trainer/loop.py",
        "a resumed run has lost surplus groups, unfinished responses and the replay buffer",
        "        run.carryover.save(folder, run.context.info.rank)\n",
        "",
    ),
    Fault(
        "bfloat16-ties-up",
        "rlhpc/convert/arrays.py",
        "converted weights halfway between two bfloat16 numbers are rounded up, not to even as PyTorch does",
        "((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16)",
        "((bits + 0x8000) >> 16)",
    ),
    Fault(
        "failures-never-forgotten",
        "rlhpc/launch/supervise/policy.py",
        "a long run stops after a few failures in all, even if it made progress between them",
        "failures = 0 if progressed else former",
        "failures = former",
    ),
    Fault(
        "job-end-unknown",
        "rlhpc/launch/supervise/batch_job.py",
        "the launcher never learns when the job ends, and the run is killed at its time limit without a checkpoint",
        '"-o", "%e")',
        '"-o", "%E")',
    ),
    Fault(
        "job-fields-from-its-command-line",
        "rlhpc/launch/slurm/queue.py",
        "words of a job's own command line are taken for its state, nodes or reason",
        "dict(reversed(pairs))",
        "dict(pairs)",
    ),
    Fault(
        "exit-code-lost",
        "rlhpc/cli/main.py",
        "`rlhpc run` exits with 0 when the run has failed",
        "sys.exit(run_here(loaded, resume=resume))",
        "run_here(loaded, resume=resume)",
    ),
    Fault(
        "part-process-death-unseen",
        "rlhpc/site/acceptance/workers.py",
        "an acceptance takes a case whose process has crashed for a finished one",
        """self._messages.put((rank, "died", f"signal {-code}" if code < 0 else f"exit code {code}"))""",
        """self._messages.put((rank, "done", None))""",
    ),
    Fault(
        "damaged-piece-installed",
        "rlhpc/site/pieces/install_pieces.py",
        "a piece that was damaged on its way is joined and installed",
        'place.stat().st_size == piece["bytes"] and sha256_of(place) == piece["sha256"]:',
        'place.stat().st_size == piece["bytes"]:',
    ),
    Fault(
        "remedy-that-helps-nothing",
        "rlhpc/plan/remedies.py",
        "`rlhpc plan` recommends changes after which the same phase still does not fit",
        "first is None or order.index(first.name) > order.index(before.name)",
        "first is None or order.index(first.name) >= order.index(before.name)",
    ),
    Fault(
        "divisor-and-dividend-swapped",
        "rlhpc/plan/checks/parallelism.py",
        "layouts that Megatron cannot build pass every check and fail hours later in the queue",
        "    if number % size:\n",
        "    if size % number:\n",
    ),
    Fault(
        "exchange-with-itself",
        "rlhpc/plan/estimates/roofline.py",
        "predicted times of expert exchanges over the network are too short",
        "across = (ranks - inside) / (ranks - 1)",
        "across = (ranks - inside) / ranks",
    ),
    Fault(
        "run-folder-shared",
        "rlhpc/launch/run_lock.py",
        "two launchers write into one run folder",
        "fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)",
        "fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB)",
    ),
    Fault(
        "shared-tmpdir-kept",
        "rlhpc/launch/worker/node_folders.py",
        "another user of the node makes the caches that ranks unpickle",
        "private = bool(given and not why and _is_private(given))",
        "private = bool(given and not why)",
    ),
    Fault(
        "objects-unchecked",
        "rlhpc/checkpoint/formats/model_folder.py",
        "a model folder whose objects run code passes the check before the ranks start",
        "    check_objects(index, shape, folder)\n",
        "",
    ),
    Fault(
        "objects-unrestricted",
        "rlhpc/parallel/compat.py",
        "an object of a model folder runs code in every rank",
        "    with _replaced(stand_ins):\n            yield",
        "    with _replaced(stand_ins[2:]):\n            yield",
    ),
    Fault(
        "strangers-among-the-ranks",
        "rlhpc/parallel/meeting.py",
        "a group is used although another program has taken a rank's place",
        "lost = sum(not accepted.get(end, False) for end in ours)",
        "lost = sum(end not in accepted for end in ours)",
    ),
    Fault(
        "run-folder-not-written",
        "rlhpc/launch/worker/node_check.py",
        "a node on which the run folder is read-only passes its check and fails in the first checkpoint",
        "_check_run_folder(run_dir, write=first_here)",
        "_check_run_folder(run_dir, write=False)",
    ),
    Fault(
        "job-found-by-a-part-of-its-id",
        "rlhpc/launch/runs/run_registry.py",
        "`rlhpc cancel 12` means job 123",
        'text in (run.job.job_id, run.job.job_id.partition("_")[0])',
        "text in run.job.job_id",
    ),
    Fault(
        "misaligned-safetensors",
        "rlhpc/checkpoint/formats/safetensors_headers.py",
        "converted files have tensors at addresses that readers with aligned loads refuse",
        'text += b" " * (-len(text) % 8)',
        'text += b" " * (len(text) % 8)',
    ),
    Fault(
        "mfu-of-one-microbatch",
        "rlhpc/site/acceptance/parts/mfu.py",
        "acceptance reports the MFU of one microbatch for the time of all",
        "training_flops(shape, self.lengths) * self.microbatches",
        "training_flops(shape, self.lengths)",
    ),
)
