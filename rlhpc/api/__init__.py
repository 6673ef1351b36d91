"""Layer 3: the values that cross packages and the protocols of the executors."""

from rlhpc.api.protocols import BackgroundWrite, LossFunction, RolloutEngine, TrainBackend
from rlhpc.api.types import Completion, LossSums, PackedBatch, Prompt, Request, RunState, Sample, TokenStats, TrainStats

__all__ = [
    "BackgroundWrite",
    "Completion",
    "LossFunction",
    "LossSums",
    "PackedBatch",
    "Prompt",
    "Request",
    "RolloutEngine",
    "RunState",
    "Sample",
    "TokenStats",
    "TrainBackend",
    "TrainStats",
]
