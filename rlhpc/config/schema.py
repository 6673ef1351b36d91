"""The whole configuration of a run: one YAML file, strict keys, each field said in a line.

Field descriptions go into the JSON schema that editors complete from (``rlhpc schema``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # package.module:attribute


class Section(BaseModel):
    """A frozen group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


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


class KLSection(Section):
    coefficient: NonNegativeFloat = 0.001
    """Weight of the KL term; 0: no reference model is built."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""


class AlgorithmSection(Section):
    name: str = "grpo"
    """grpo, or package.module:attribute of an algorithm of your own."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: PositiveFloat = 0.2
    """See clip_low."""
    normalise_std: bool = True
    """Divide a group's advantages by their standard deviation."""
    std_epsilon: PositiveFloat = 1e-6
    """Added to that deviation."""
    aggregation: Literal["token-mean", "sequence-mean"] = "token-mean"
    """Mean over all response tokens of the batch, or over sequences of each one's token mean."""
    kl: KLSection = KLSection()
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss."""


class OptimizerSection(Section):
    """AdamW (Loshchilov and Hutter 2019); no decay on vectors (norms and biases)."""

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
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """See schedule."""


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


class ContainerSection(Section):
    """The ranks run in a container; the launcher around them does not."""

    runtime: Literal["apptainer", "pyxis"]
    """Which one the site has: `apptainer exec` (or singularity), or srun's --container-image (Enroot)."""
    image: str
    """Image file or address, as the runtime takes it; rlhpc and what it trains with are installed inside."""
    mounts: list[Annotated[str, Field(pattern=r"^/[^,]*$")]] = []
    """Host folders to mount, /path or /path:/inside[:ro]; the run folder, model and data are added by themselves."""
    python: str = "python3"
    """The Python inside the image."""
    options: list[str] = []
    """Further options of `apptainer exec`, or of srun for Pyxis."""


class SlurmSection(Section):
    """The batch job that `rlhpc submit` asks for. What is left out is the site's default."""

    nodes: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    """Nodes of the job, or [least, most]: it starts with what is free, and may come back with another number."""
    time: PositiveInt | Annotated[str, Field(pattern=r"^(\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2})$")] | None = None
    """Time limit as Slurm takes it: minutes, HH:MM:SS or D-HH:MM:SS. A longer run saves in time and is requeued."""
    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation."""
    constraint: str | None = None
    """Node features."""
    comment: str | None = None
    """Comment shown to administrators; everyone on the cluster can read it."""
    exclude: list[str] = []
    """Nodes never to be used."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs on each node; default: one for each rank. 0: ranks compute on the CPU."""
    gpu_type: str | None = None
    """Kind of GPU by the site's name, such as h100."""
    cpus_per_rank: PositiveInt | None = None
    """CPU cores of each rank."""
    memory: NonNegativeInt | Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Host memory of each node, such as 480G, or a number of MiB; 0: all of it."""
    modules: list[str] = []
    """Environment modules to load, in this order."""
    conda: str | None = None
    """Conda environment to activate, by name or folder."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = {}
    """Environment variables of the job."""
    setup: list[str] = []
    """Shell lines run on the first node, before the ranks start."""
    container: ContainerSection | None = None
    interface: str | None = None
    """Network interface of NCCL and gloo on every node; default: the one that leads to the first node."""
    cpu_bind: str | None = None
    """srun's --cpu-bind, such as cores; default: the site's."""
    sbatch_options: dict[str, str | int | bool] = {}
    """Further options of sbatch by their long names without --."""
    srun_options: list[str] = []
    """Further options of srun, as written on its command line."""
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of the rendezvous on the first node; default: 20000 + job id modulo 10000. Another one if it is taken."""

    @property
    def least_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else self.nodes[0]

    @property
    def most_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else self.nodes[1]


class RecoverySection(Section):
    """What a Slurm job does by itself when it fails. Wrong input and errors of the user's code stop it at once."""

    retries: NonNegativeInt = 5
    """Most failures in a row; one that comes after a newer checkpoint counts from one again."""
    wait_seconds: NonNegativeFloat = 120.0
    """Pause before a retry."""
    out_of_memory: Literal["shrink", "stop"] = "shrink"
    """shrink: halve train.tokens_per_microbatch, or on the engine's side rollout.max_running, and go on."""
    network: Literal["retry", "stop"] = "retry"
    """Lost connections, NCCL and gloo timeouts: retry, waiting twice as long each time."""
    bad_node: Literal["exclude", "retry", "stop"] = "exclude"
    """GPU or node faults, and a node on which ranks die twice in a row: leave it out of the job from then on."""
    hang: Literal["retry", "stop"] = "retry"
    """No rank made progress for silence_seconds."""
    disk_full: Literal["retry", "stop"] = "retry"
    """Disk or quota exhausted: retry, waiting twice as long each time."""
    crash: Literal["retry", "stop"] = "retry"
    """A rank died by a signal, srun could not start the ranks, or an error that fits no other cause."""
    silence_seconds: PositiveFloat = 1800.0
    """So long without progress of any rank is a hang: all Python stacks are written and the job's ranks ended."""
    start_seconds: PositiveFloat = 1800.0
    """The same, from the start of the ranks to their first step: models are built and loaded in between."""


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
    algorithm: AlgorithmSection = AlgorithmSection()
    sft: SFTSection | None = None
    train: TrainSection
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
