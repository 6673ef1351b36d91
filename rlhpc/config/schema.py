"""The whole configuration of a run: one YAML file, strict keys, each field said in a line.

Field descriptions go into the JSON schema that editors complete from (``rlhpc schema``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhpc.config.algorithm import AlgorithmSection
from rlhpc.config.jobs import RecoverySection, SlurmSection
from rlhpc.config.section import (
    Fraction,
    ImportPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class PrepareSection(Section):
    """Code that makes the run's inputs on the machine, run once before the checks."""

    function: ImportPath
    """Called as function(**arguments); must do nothing when its output is already there."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""


class ModelSection(Section):
    path: Path
    """Folder with config.json, safetensors and tokenizer, as HuggingFace saves them."""
    family: ImportPath | None = None
    """A model family of your own, a value of type rlhpc.models.Family; default: the one that config.json names."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations in training and rollout; master weights are float32 always."""


class ResourcesSection(Section):
    ranks_per_node: PositiveInt = 1
    """Processes on each node: one per GPU, or per group of CPU cores."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; default: in a job slurm.cpus_per_rank, else the machine's cores shared evenly."""


class ParallelSection(Section):
    """How the training side is cut. Data parallelism takes the ranks that are left."""

    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline parallel size."""
    vpp: PositiveInt | None = None
    """Virtual pipeline stages on each pipeline rank: shorter pauses at the price of more messages. Needs pp > 1."""
    first_stage_layers: PositiveInt | None = None
    """Layers on the first pipeline rank; default: as many as on each rank between first and last."""
    last_stage_layers: PositiveInt | None = None
    """Layers on the last pipeline rank; default: as many as on each rank between first and last."""
    cp: PositiveInt = 1
    """Context parallel size: each sequence is cut over so many ranks."""
    cp_method: Literal["all_gather", "ulysses"] = "all_gather"
    """How those ranks come to attend to whole sequences: all_gather gives each one all keys and values, ulysses gives
    it all tokens of some heads (Jacobs et al. 2023) and needs the heads of a tensor-parallel rank to divide by cp."""
    ep: PositiveInt = 1
    """Expert parallel size: the experts of a layer are divided among so many ranks."""
    etp: PositiveInt = 1
    """Tensor parallel size inside an expert."""
    expert_dispatch: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts: each to its own, or all to all of them."""
    sequence_parallel: bool = True
    """Cut activations along the sequence between tensor-parallel regions; used when tp > 1. Experts and latent
    attention need it then."""


class DataSection(Section):
    train: list[Path] = []
    """Prompt files for RL, .parquet or .jsonl, with columns prompt (messages), data_source, reward_model,
    extra_info."""
    validation: list[Path] = []
    """Held-out prompt files of the same form."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, the chat template's tokens included."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt longer than max_prompt_tokens."""
    shuffle: bool = True
    """Take training prompts in a new order in each pass over them; false: in the files' order."""
    chat_template: bool = True
    """Render messages with the tokenizer's chat template; false: join their contents as they are."""


class RewardSection(Section):
    function: ImportPath = "rlhpc.data.rewards:maths"
    """Called as function(data_source, solution_str, ground_truth, extra_info, **arguments); returns a number, or a
    dict with the key score."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""


class RolloutSection(Section):
    tp: PositiveInt = 1
    """Tensor parallel size of each vLLM engine."""
    expert_parallel: bool = False
    """Each of an engine's tp ranks keeps whole experts instead of a part of every one; no effect on dense models."""
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt of an RL step: the group that a response is compared with."""
    max_response_tokens: PositiveInt = 1024
    """A response is cut off here."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in sampling and in the loss."""
    top_p: Fraction = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    max_running: PositiveInt = 256
    """Most sequences that an engine decodes at once."""
    kv_cache_gib: PositiveFloat | None = None
    """Size of each engine's KV cache on a rank; default on a GPU: what gpu_memory_fraction leaves, on a CPU: 1 GiB."""
    gpu_memory_fraction: Fraction = 0.6
    """Share of the GPU's memory that engine weights and KV cache may take while generating."""
    prefix_caching: bool = True
    """vLLM keeps the cache of a prompt for all its responses."""
    chunked_prefill: bool = True
    """vLLM takes long prompts in parts, between the tokens of others."""
    cuda_graphs: bool = True
    """Capture CUDA graphs for decoding; no effect on a CPU."""


class ReshardSection(Section):
    """How weights get from training into the engines."""

    method: Literal["direct", "gather"] = "direct"
    """direct: each rank receives what it lacks; gather: whole tensors, through vLLM's own loader."""
    bucket_mib: PositiveInt = 256
    """Most that a rank sends or receives at once, and so the memory it takes besides the weights, on each side."""
    verify: Literal["always", "never"] | PositiveInt = 50
    """Compare checksums of both sides at the first push and at every so many after it, always or never."""
    max_engine_gap: PositiveFloat | None = 0.5
    """Mean difference of the engine's log-probs from the trainer's, in a step, that ends the run; null: none does."""
    share_weights: bool = False
    """Engines use the trainer's memory for parameters that are the same bytes on both sides. Not with offload."""


class OptimizerSection(Section):
    """AdamW (Loshchilov and Hutter 2019) unless ``function`` says otherwise; no decay on vectors (norms and biases)."""

    learning_rate: PositiveFloat = 1e-6
    """Highest rate of the schedule."""
    beta1: Fraction = 0.9
    """Decay of the gradient's running mean."""
    beta2: Fraction = 0.999
    """Decay of the running mean of the gradient's square."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of that mean."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled, scaled by the learning rate."""
    clip_gradient: PositiveFloat = 1.0
    """Bound on the global gradient norm."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after the warm-up, down to final_fraction of the rate at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the rate rises linearly."""
    final_fraction: Share = 0.0
    """See schedule."""
    host_fraction: Share = 0.0
    """AdamW only: this share of the parameters has its moments in host memory and is updated there, by the CPU."""
    function: ImportPath | None = None
    """Your own in place of AdamW, called as function(param_groups, **arguments); see docs/optimizer.md."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function; beta1, beta2 and epsilon are AdamW's own and not passed on."""


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


class ExpertsSection(Section):
    """Mixture-of-experts models; no effect on others."""

    aux_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss (Fedus et al. 2022, section 2.2); 0: routers learn from the objective alone."""
    bias_update_rate: NonNegativeFloat = 0.0
    """By how much an update moves each expert's bias towards equal load, in models that have one; 0: it is frozen."""
    replay_routes: bool = False
    """Send each token to the experts that it went to when it was generated (routing replay, arXiv 2510.11370)."""


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
    optimizer: OptimizerSection = OptimizerSection()
    experts: ExpertsSection = ExpertsSection()


class OffloadSection(Section):
    """What leaves the training device while it is not needed. It comes back by itself before it is used."""

    parameters: bool = False
    """The actor's weights, while the engine generates."""
    gradients: bool = False
    """Gradient buffers, outside of updates: freed, their content is not kept."""
    optimizer: bool = False
    """Master weights and moments, outside of updates."""
    reference: bool = False
    """The frozen reference model, except while it computes."""
    fraction: Share = 1.0
    """At least this share of the chosen bytes, in whole buffers: gradients first, then optimizer, then weights."""


class MemorySection(Section):
    """How training is made to fit into the device's memory, in both phases; see docs/memory.md."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations not kept for the backward pass but computed again: of recompute_modules, or of all layers."""
    recompute_modules: list[Literal["core_attn", "mlp", "moe", "shared_experts"]] = ["core_attn", "mlp", "moe"]
    """With selective, of those that the model has: attention without its projections, dense feed-forward, expert
    layers, shared experts."""
    recompute_layers: PositiveInt = 1
    """With full: layers of which only the first one's input is kept."""
    offload: OffloadSection = OffloadSection()


class ValidationSection(Section):
    every: PositiveInt = 10
    """RL steps between validations; one is made before the first step and after the last as well."""
    temperature: NonNegativeFloat = 0.0
    """Of the one response to each prompt; 0: always the likeliest token."""
    max_prompts: PositiveInt | None = None
    """Use only so many of the held-out prompts, the first ones; default: all."""


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
    sft: SFTSection | None = None
    train: TrainSection
    memory: MemorySection = MemorySection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()

    @property
    def world_size(self) -> int:
        """Ranks of the largest job that slurm.nodes allows."""
        return self.slurm.most_nodes * self.resources.ranks_per_node

    @property
    def folder(self) -> Path:
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name
