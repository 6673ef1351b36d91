"""Values that packages exchange, and the protocols of back end, engine and reward workers."""

from rlhpc.api.protocols import BackgroundWrite, CheckWeights, LossFunction, RewardWorkers, RolloutEngine, TrainBackend
from rlhpc.api.types import (
    Completion,
    KeptTokens,
    LossSums,
    PackedBatch,
    Prompt,
    Request,
    RewardResult,
    RunState,
    Sample,
    SamplingOptions,
    TokenStats,
    TokenValues,
    TrainStats,
    UnusableTruth,
)

__all__ = [
    "BackgroundWrite",
    "CheckWeights",
    "Completion",
    "KeptTokens",
    "LossFunction",
    "LossSums",
    "PackedBatch",
    "Prompt",
    "Request",
    "RewardResult",
    "RewardWorkers",
    "RolloutEngine",
    "RunState",
    "Sample",
    "SamplingOptions",
    "TokenStats",
    "TokenValues",
    "TrainBackend",
    "TrainStats",
    "UnusableTruth",
]
