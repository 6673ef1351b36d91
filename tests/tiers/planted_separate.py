"""Plausible faults of generation beside training, part of those that ``tests.tiers.planted`` lists."""

from __future__ import annotations

from tests.tiers.fault import Fault

SEPARATE_FAULTS = (
    Fault(
        "stale-prefix-cache",
        "rlhpc/rollout/vllm_requests.py",
        "after a weight sync, responses are generated from cached prefixes of the old weights",
        'assert self._engine.reset_prefix_cache(), "requests still use cached prefixes of the old weights"\n',
        "pass\n",
    ),
    Fault(
        "prefixes-of-kept-caches",
        "rlhpc/rollout/vllm_requests.py",
        "beside responses that keep their KV cache, new ones use cached prefixes of the old weights",
        "            self._syncs += 1\n",
        "            self._syncs += 0\n",
    ),
    Fault(
        "one-kind-of-idle-time",
        "rlhpc/rollout/generator/messages.py",
        "an engine's idle time counts only what it waited for longest",
        "return sum(self.idle.values())",
        "return max(self.idle.values(), default=0.0)",
    ),
    Fault(
        "engine-resumes-in-another-order",
        "rlhpc/rollout/generator/lead.py",
        "a resumed engine has its requests in another order than the one that wrote its state",
        "                for draft in drafts\n",
        "                for draft in reversed(drafts)\n",
    ),
    Fault(
        "one-rank-receives-for-its-node",
        "rlhpc/reshard/staged/plan.py",
        "one rank of a node receives and forwards almost all of the weights: a weight sync takes several times as long",
        "loads[place] += cell.size",
        "loads[place] -= cell.size",
    ),
    Fault(
        "version-changed-while-it-is-sent",
        "rlhpc/reshard/staged/source.py",
        "engines on ranks of their own receive a mixture of two versions of the weights",
        "        self.finish()\n        self._known",
        "        self._known",
    ),
    Fault(
        "delta-of-another-base",
        "rlhpc/reshard/staged/receivers.py",
        "an engine that has lost a part of a version computes all later ones from wrong weights",
        "return checksum(place) == header.result",
        "return True",
    ),
    Fault(
        "delta-gaps-start-in-each-chunk",
        "rlhpc/reshard/staged/delta.py",
        "in large messages, changes of weights arrive at other elements",
        "prepend=last - start",
        "prepend=-1",
    ),
    Fault(
        "lent-requests-return-in-another-order",
        "rlhpc/rollout/collect.py",
        "an engine has requests that lenders return in another order than its schedule counts on",
        "        for task in unfinished:\n            self._request(task)\n        return",
        "        for task in reversed(unfinished):\n            self._request(task)\n        return",
    ),
    Fault(
        "lender-leaves-a-step-on-the-device",
        "rlhpc/rollout/generator/lending.py",
        "on a GPU, a lender withdraws requests while a step with them is in flight: it ends, or loses tokens",
        "    collector.switch(lent.policy_version)",
        "    pass",
    ),
    Fault(
        "batch-closes-a-group-early",
        "rlhpc/rollout/schedule/batches.py",
        "a step of a separate placement trains on one group less than the others count for it",
        "while len(self._kept) < size and",
        "while len(self._kept) < max(size - 1, 1) and",
    ),
    Fault(
        "version-due-before-its-last-group",
        "rlhpc/rollout/schedule/knowledge.py",
        "an engine switches earlier in a run in which news of the others are late: two runs differ",
        "if group < sure:",
        "if group < sure - 1:",
    ),
    Fault(
        "reference-beside-engines-ignores-temperature",
        "rlhpc/trainer/engine_models.py",
        "with reference.on engines the KL term compares log-probs at different temperatures",
        "samples, self.temperature)",
        "samples, 1.0)",
    ),
    Fault(
        "resumed-engine-delivers-unscored-groups",
        "rlhpc/rollout/generator/lead.py",
        "a resumed run trains on groups without the part of a reward model on engines",
        "self._finish(self._shelf.delivered)",
        "self._deliver(self._shelf.delivered)",
    ),
    Fault(
        "engine-scores-twice",
        "rlhpc/rollout/generator/loop.py",
        "a reward model on engines counts twice",
        "scored = self._parts.models.score(groups)",
        "scored = self._parts.models.score(self._parts.models.score(groups))",
    ),
    Fault(
        "engines-score-in-step",
        "rlhpc/trainer/roles.py",
        "an engine that scores a group waits for all others to score one too",
        "replace(layout, world_size=layout.tp * layout.cp) if self.alone else layout",
        "layout",
    ),
    Fault(
        "masked-tokens-count-in-the-kl-penalty",
        "rlhpc/trainer/advantages.py",
        "with reference.on engines and a KL penalty in the reward, tokens of tools have a part in it",
        "return found if sample.response_mask is None else np.where(sample.response_mask, found, np.float32(0))",
        "return found",
    ),
)
