"""The whole configuration of a run: one YAML file, strict keys, each field said in a line.

Field descriptions go into the JSON schema that editors complete from (``rlhpc schema``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhpc.config.algorithm import AlgorithmSection
from rlhpc.config.critic import CriticSection
from rlhpc.config.data import DataSection, ValidationSection
from rlhpc.config.jobs import RecoverySection, SlurmSection
from rlhpc.config.planning import PlanningSection
from rlhpc.config.reward import RewardSection
from rlhpc.config.rollout import DynamicSamplingSection, ReplaySection, RolloutSection
from rlhpc.config.section import (
    ImportPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rlhpc.config.training import ExpertsSection, MemorySection, OptimizerSection, ParallelSection


class PrepareSection(Section):
    """Code that makes the run's inputs on the machine, run once before the checks."""

    function: ImportPath
    """Called as function(**arguments); must do nothing when its output is already there."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""


class ModelSection(Section):
    path: Path
    """Folder with config.json, safetensors and tokenizer, as HuggingFace saves them."""
    weights: Path | None = None
    """Folder of the weights if they are not in path, such as checkpoints/step-00000120/actor of another run."""
    family: ImportPath | None = None
    """A model family of your own, a value of type rlhpc.models.Family; default: the one that config.json names."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations in training and rollout; master weights are float32 always."""


class ResourcesSection(Section):
    ranks_per_node: PositiveInt = 1
    """Processes on each node: one per GPU, or per group of CPU cores."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; default: in a job slurm.cpus_per_rank, else the machine's cores shared evenly."""


class ReshardSection(Section):
    """How weights get from training into the engines."""

    method: Literal["direct", "gather"] = "direct"
    """direct: each rank receives what it lacks; gather: whole tensors, through vLLM's own loader."""
    bucket_mib: PositiveInt = 256
    """Most that a rank sends or receives at once, and so the memory it takes besides the weights, on each side."""
    verify: Literal["always", "never"] | PositiveInt = 50
    """Compare checksums of both sides at the first weight sync and at every so many after it, always or never."""
    max_logprob_diff: PositiveFloat | None = 0.5
    """Mean difference of the engine's log-probs from the trainer's, in a step, that ends the run; null: none does, nor
    with rollout.top_p below 1."""
    share_weights: bool = False
    """Engines use the trainer's memory for parameters that are the same bytes on both sides. Not with offload."""


class SFTOptimizerSection(OptimizerSection):
    learning_rate: PositiveFloat = 1e-5
    """Highest rate of the schedule."""


class SFTSection(Section):
    """Supervised warm-up before RL, on the same trainer."""

    data: list[Path]
    """Files with a column messages (chat) or prompt and response; the loss is on the last assistant message."""
    steps: PositiveInt
    """Supervised steps of the whole run."""
    sequences_per_step: PositiveInt = 64
    """Examples in each step, over all ranks."""
    optimizer: SFTOptimizerSection = SFTOptimizerSection()


class TrainSection(Section):
    """The RL phase."""

    steps: NonNegativeInt
    """RL steps of the whole run; 0: only the supervised warm-up."""
    prompts_per_step: PositiveInt = 64
    """Prompts in each step, over all ranks."""
    minibatches: PositiveInt = 1
    """Optimizer updates that each step's samples are divided into."""
    epochs: PositiveInt = 1
    """Passes over each step's samples."""
    tokens_per_microbatch: PositiveInt = 16384
    """Most tokens that a rank takes through forward and backward at once; never less than one sequence."""
    log_prob_tokens_per_microbatch: PositiveInt | None = None
    """The same for passes without gradient, of actor and reference model; default: tokens_per_microbatch."""
    mask_truncated: bool = False
    """Learn nothing from responses that were cut off (overlong filtering), though they count among their group."""
    max_skipped_updates: PositiveInt = 3
    """Updates of one model skipped in a row, for gradients that are not finite, that end the run; in the supervised
    warm-up too."""
    dynamic_sampling: DynamicSamplingSection | None = None
    replay: ReplaySection | None = None
    optimizer: OptimizerSection = OptimizerSection()
    experts: ExpertsSection = ExpertsSection()


class CheckpointSection(Section):
    every: NonNegativeInt = 20
    """Steps (warm-up steps too) between checkpoints; 0: only at the end, and where the run must stop."""
    keep: PositiveInt = 2
    """Newest checkpoints kept on disk."""
    asynchronous: bool = False
    """Write checkpoints in the background of training; the last one, and where the run must stop, at once."""


class ObserveSection(Section):
    tensorboard: bool = True
    """Write the metrics for TensorBoard too."""
    samples: NonNegativeInt = 8
    """Samples of each validation written to samples.jsonl and shown at the end."""


class RunConfig(Section):
    """One run of rlhpc."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Letters, digits and . _ -"""
    run_dir: Path | None = None
    """Where everything of the run is written; default: runs/<name>."""
    seed: NonNegativeInt = 0
    """Of sampling and of the order of the data."""
    prepare: PrepareSection | None = None
    model: ModelSection
    resources: ResourcesSection = ResourcesSection()
    slurm: SlurmSection = SlurmSection()
    recovery: RecoverySection = RecoverySection()
    parallel: ParallelSection = ParallelSection()
    data: DataSection = DataSection()
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    reshard: ReshardSection = ReshardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    sft: SFTSection | None = None
    train: TrainSection
    memory: MemorySection = MemorySection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()
    planning: PlanningSection = PlanningSection()

    @property
    def world_size(self) -> int:
        """Ranks of the largest job that slurm.nodes allows."""
        return self.slurm.most_nodes * self.resources.ranks_per_node

    @property
    def evaluates_only(self) -> bool:
        """There is nothing to learn."""
        return not self.train.steps and self.sft is None

    @property
    def folder(self) -> Path:
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name
