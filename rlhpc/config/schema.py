"""The configuration of a run: one YAML file with strict keys.

Field docstrings become the descriptions in the JSON schema (``rlhpc schema``) and in docs/configuration.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhpc.config.algorithm import AlgorithmSection
from rlhpc.config.data import DataSection, ValidationSection
from rlhpc.config.jobs import RecoverySection, SlurmSection
from rlhpc.config.observe import ObserveSection, ProfileSection
from rlhpc.config.reward import (
    DEFAULT_FUNCTION,
    RewardEntry,
    RewardFunctionSection,
    RewardModelSection,
    RewardWorkersSection,
)
from rlhpc.config.rollout import (
    AsynchronySection,
    DynamicSamplingSection,
    JudgesSection,
    PlacementName,
    ReplaySection,
    RolloutSection,
)
from rlhpc.config.section import (
    FileName,
    ImportPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rlhpc.config.site import PathOrSection, PlanningSection, SiteSection
from rlhpc.config.training import ActorSection, CriticSection, OptimizerSection, ReferenceSection


class PrepareSection(Section):
    """User code that creates the run's inputs, called once before the checks."""

    function: ImportPath
    """Import path of a function called as function(**arguments); it must do nothing when its output exists."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""


class ModelSection(Section):
    path: Path
    """Path to a HuggingFace model folder: config.json, safetensors and tokenizer."""
    weights: Path | None = None
    """Path to the weights if they are not in path, such as checkpoints/step-00000120/actor of another run."""
    family: ImportPath | None = None
    """Import path of your own model family (rlhpc.models.Family); default: the one that config.json names."""
    trust_remote_code: bool = False
    """Execution of Python code in the model folder, with train.backend fsdp; such models are not tested."""
    rope_tokens: PositiveInt | None = None
    """Number of tokens at which dynamic RoPE is fixed, in all models of the run and in exports; needed beyond the
    model's positions."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of weights and activations in training and rollout; master weights are always float32."""


class ResourcesSection(Section):
    ranks_per_node: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of processes per node. Default: one per visible GPU with `rlhpc run`, per GPU of slurm.gpus_per_node with
    `rlhpc submit`; 1 on CPUs."""
    threads_per_rank: PositiveInt | None = None
    """Number of CPU threads per rank; default: slurm.cpus_per_rank in a job, else an even share of the cores."""


class ReshardSection(Section):
    """Weight sync from training into the engines."""

    method: Literal["direct", "gather"] = "direct"
    """Method: direct sends each rank only the blocks it lacks; gather goes through whole tensors and vLLM's loader."""
    bucket_mib: PositiveInt = 256
    """Maximum that a rank sends or receives at once, in MiB: the extra memory of a weight sync on each side."""
    verify: Literal["always", "never"] | PositiveInt = 50
    """Interval of checksum comparisons in weight syncs, after one at the first; or always, or never."""
    delta: Literal["off", "plain", "compressed"] = "off"
    """Weight syncs that send only changed elements, of a bfloat16 model with placement separate: plain values, or
    compressed differences."""
    max_logprob_diff: PositiveFloat | Literal["auto"] | None = "auto"
    """Maximum of logprob_diff_mean before the run ends with an error; null: no maximum. auto: 0.5; in the first step
    after a start 0.05, or 0.001 in float32 on a CPU. Ignored where other than the trained distribution is sampled."""
    share_weights: bool = False
    """Sharing of memory for parameters that are byte-identical in trainer and engine. Excludes offloading."""


class SFTOptimizerSection(OptimizerSection):
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""


class SFTSection(Section):
    """Supervised warm-up before RL, on the same trainer."""

    data: list[Path]
    """Paths of files with a column messages (chat), or prompt and response."""
    train_on: Literal["last_turn", "all_turns"] = "last_turn"
    """Turns of the assistant that the loss covers; all_turns: those between {% generation %} tags, if the chat template
    has any."""
    steps: PositiveInt
    """Number of supervised steps in the whole run."""
    sequences_per_step: PositiveInt = 64
    """Number of examples per step, over all ranks."""
    optimizer: SFTOptimizerSection = SFTOptimizerSection()


class TrainSection(Section):
    """The RL phase, and the back end of all models that are trained or score."""

    backend: Literal["auto", "megatron", "fsdp"] = "auto"
    """Training back end: megatron-core for known families, or PyTorch's FSDP2 for any causal language model of
    transformers. auto: megatron where the family is known."""
    steps: NonNegativeInt
    """Number of RL steps in the whole run; 0: supervised warm-up only."""
    prompts_per_step: PositiveInt = 64
    """Number of prompts per step, over all ranks."""
    minibatches: PositiveInt = 1
    """Number of optimizer updates that each step's samples are divided into."""
    epochs: PositiveInt = 1
    """Number of passes over each step's samples."""
    shuffle: bool = True
    """Shuffling of a step's groups between epochs, and of replayed groups among new ones, with minibatches above 1."""
    tokens_per_microbatch: PositiveInt = 16384
    """Maximum tokens per rank in one forward and backward pass; a longer sequence is a microbatch of its own."""
    log_prob_tokens_per_microbatch: PositiveInt | None = None
    """Maximum tokens per rank in log-prob passes of actor and reference; default: tokens_per_microbatch."""
    mask_truncated: bool = False
    """Overlong filtering: truncated responses are masked from the loss, but still count in their group's baseline."""
    max_skipped_updates: PositiveInt = 3
    """Maximum consecutive updates of one model skipped for their gradients before the run ends; in the supervised
    warm-up too."""
    max_grad_norm_ratio: Annotated[float, Field(gt=1)] | None = None
    """Maximum ratio of an update's gradient norm to the median of its model's last 64, above which it is skipped.
    Default: no maximum."""
    compile: Literal["auto", "functions", "blocks", "none"] = "auto"
    """Compilation by torch.compile: small functions between matrix products (functions; auto: on a GPU), or whole
    layers with backend fsdp (blocks)."""
    step: ImportPath | None = None
    """Import path of your own RL step, called as step(run, state); default: rlhpc.trainer.step:rl_step."""
    dynamic_sampling: DynamicSamplingSection | None = None
    replay: ReplaySection | None = None


class CheckpointSection(Section):
    every: NonNegativeInt = 20
    """Interval between checkpoints in steps, warm-up steps included; 0: only at the end and when the run must stop."""
    every_minutes: PositiveFloat | None = None
    """Interval between checkpoints in minutes, beside every: the step that ends so long after the newest one is saved;
    default: by steps only."""
    keep: PositiveInt = 2
    """Number of newest checkpoints kept on disk."""
    asynchronous: bool = False
    """Background writing of checkpoints during training; the last one, and one before a stop, are written at once."""
    keep_best: str | None = None
    """Validation metric, such as reward_mean or pass@1: the checkpoint with its best value is saved and kept beside the
    newest."""
    greater_is_better: bool = True
    """Direction of keep_best: true if greater values are better, false if smaller ones are."""
    export: Literal["none", "hf"] = "none"
    """Copy of the actor beside checkpoints, as a folder that transformers and vLLM open. Training waits for it."""
    export_at: Literal["last", "best", "all"] = "last"
    """Checkpoints with an export: the one after the last step, that and each new best one by keep_best, or all."""

    @property
    def best_metric(self) -> str | None:
        """Name of keep_best's metric in metrics.jsonl."""
        return None if self.keep_best is None else f"validation/{self.keep_best.removeprefix('validation/')}"


RoleOfModel = Literal["trainers", "judges", "engines"]


class RunConfig(Section):
    """One run of rlhpc."""

    name: FileName
    """Name of the run: letters, digits and . _ -"""
    run_dir: Path | None = None
    """Path of the run folder, where everything is written; default: runs/<name>."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed for sampling and data order."""
    prepare: PrepareSection | None = None
    model: ModelSection
    resources: ResourcesSection = ResourcesSection()
    slurm: SlurmSection = SlurmSection()
    recovery: RecoverySection = RecoverySection()
    data: DataSection = DataSection()
    actor: ActorSection = ActorSection()
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    rewards: Annotated[list[RewardEntry], Field(min_length=1)] = [RewardFunctionSection(function=DEFAULT_FUNCTION)]
    """Rewards of a response, whose weighted sum counts: functions, and at most one model. An entry has either function
    or model."""
    reward_workers: RewardWorkersSection = RewardWorkersSection()
    placement: PlacementName = "colocated"
    """Placement of training and generation: both on every rank in turn (colocated), on ranks of their own (separate),
    or lend: trainers also generate while they would wait."""
    rollout: RolloutSection = RolloutSection()
    judges: JudgesSection = JudgesSection()
    asynchrony: AsynchronySection = AsynchronySection()
    reshard: ReshardSection = ReshardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    sft: SFTSection | None = None
    train: TrainSection
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()
    profile: ProfileSection = ProfileSection()
    planning: PlanningSection = PlanningSection()
    site: Annotated[SiteSection, PathOrSection()] = SiteSection()

    @property
    def world_size(self) -> int:
        """Number of ranks in the largest job that slurm.nodes allows."""
        return self.slurm.most_nodes * self.resources.ranks_per_node

    @property
    def reward_functions(self) -> dict[str, RewardFunctionSection]:
        """Reward functions by their keys, such as rewards.0."""
        found = {f"rewards.{index}": entry for index, entry in enumerate(self.rewards)}
        return {key: entry for key, entry in found.items() if isinstance(entry, RewardFunctionSection)}

    @property
    def reward_model(self) -> RewardModelSection | None:
        return next((entry for entry in self.rewards if isinstance(entry, RewardModelSection)), None)

    @property
    def reward_model_key(self) -> str:
        """Key of the reward model's entry, such as rewards.1. Needs a reward model."""
        return f"rewards.{next(i for i, entry in enumerate(self.rewards) if isinstance(entry, RewardModelSection))}"

    @property
    def reference_on(self) -> RoleOfModel:
        """Ranks that have the reference: as configured where ranks have roles, in a run with RL steps."""
        return self.reference.on if self._has_roles else "trainers"

    @property
    def reward_model_on(self) -> RoleOfModel:
        """Ranks that have the reward model, likewise."""
        model = self.reward_model
        return model.on if model is not None and self._has_roles else "trainers"

    @property
    def may_lose_engines(self) -> bool:
        """True if training goes on without an engine that is lost."""
        return self.recovery.lost_engines == "rejoin" and self.placement == "separate" and self.train.steps > 0

    @property
    def rollout_job_nodes(self) -> int:
        """Number of nodes of each rollout job; 0 without any."""
        jobs = self.slurm.rollout_jobs
        if jobs is None or not self.may_lose_engines:
            return 0
        return jobs.nodes or (self.rollout.nodes or 0) // jobs.count

    @property
    def all_rollout_job_nodes(self) -> int:
        """Number of nodes of all rollout jobs."""
        jobs = self.slurm.rollout_jobs
        return self.rollout_job_nodes * jobs.count if jobs is not None else 0

    def in_one_job(self) -> RunConfig:
        """The same run without rollout jobs: all of its ranks are started together."""
        if self.slurm.rollout_jobs is None:
            return self
        return self.model_copy(update={"slurm": self.slurm.model_copy(update={"rollout_jobs": None})})

    @property
    def _has_roles(self) -> bool:
        return self.placement != "colocated" and self.train.steps > 0

    @property
    def evaluates_only(self) -> bool:
        """True if the run trains nothing."""
        return not self.train.steps and self.sft is None

    @property
    def folder(self) -> Path:
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name


RANKS_KEY, GPUS_KEY = "resources.ranks_per_node", "slurm.gpus_per_node"


def ranks_are_set(config: RunConfig) -> bool:
    """True if the configuration itself sets the number of ranks per node."""
    return "ranks_per_node" in config.resources.model_fields_set


def with_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """The configuration with this number of ranks per node."""
    return config.model_copy(update={"resources": config.resources.model_copy(update={"ranks_per_node": ranks})})


def with_job_ranks(config: RunConfig) -> RunConfig | None:
    """The configuration with as many ranks as ``slurm.gpus_per_node`` GPUs, or one on CPUs, if it sets no number of
    ranks; None if it sets neither."""
    gpus = config.slurm.gpus_per_node
    if ranks_are_set(config):
        return config
    return None if gpus is None else with_ranks(config, max(1, gpus))
