"""The values that cross packages and the protocols of the executors."""

from rlhpc.api.protocols import BackgroundWrite, Judge, LossFunction, RolloutEngine, TrainBackend
from rlhpc.api.types import (
    Completion,
    LossSums,
    PackedBatch,
    Prompt,
    Request,
    RunState,
    Sample,
    TokenStats,
    TokenValues,
    TrainStats,
    Verdict,
)

__all__ = [
    "BackgroundWrite",
    "Completion",
    "Judge",
    "LossFunction",
    "LossSums",
    "PackedBatch",
    "Prompt",
    "Request",
    "RolloutEngine",
    "RunState",
    "Sample",
    "TokenStats",
    "TokenValues",
    "TrainBackend",
    "TrainStats",
    "Verdict",
]
