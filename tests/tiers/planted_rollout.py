"""Faults in how responses are dealt and guessed, in positions, and in activations that leave the device."""

from tests.tiers.fault import Fault

ROLLOUT_FAULTS = (
    Fault(
        "response-that-runs-is-dealt",
        "rlhpc/rollout/dealing.py",
        "a response that runs is moved to another engine, although its conversation has its state on this one",
        "return begun and (self.rules.pinned or self.rules.turn is None)",
        "return False",
    ),
    Fault(
        "moved-response-stays-unfinished",
        "rlhpc/rollout/queued.py",
        "a group never ends on an engine that has given its last response to another one",
        "self._unfinished.subtract(task.group for task in gone)",
        "pass",
    ),
    Fault(
        "base-fixed-at-another-length",
        "rlhpc/models/rope.py",
        "positions are rotated as transformers rotates those of another length",
        "** (dim / (dim - 2))",
        "** (dim / (dim - 1))",
    ),
    Fault(
        "all-activations-stay",
        "rlhpc/parallel/activation_offload.py",
        "inputs of recomputed layers stay on the device beside their copies",
        "            self._await(last)\n            last.tensor = None",
        "            self._await(last)",
    ),
)
