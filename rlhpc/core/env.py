"""Names of all environment variables that rlhpc reads or writes."""

from __future__ import annotations

# Who this process is. Set by our launcher, by torchrun, or derived from Slurm's own.
RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # vLLM overwrites it with its tensor-parallel size
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RLHPC_STORE = "RLHPC_STORE"  # host:port of the job's own key-value store (launch/supervise/job_store.py)
RLHPC_STORE_SECRET = "RLHPC_STORE_SECRET"  # hexadecimal; a rank takes it out of its environment
RLHPC_WORLD_SIZE = "RLHPC_WORLD_SIZE"  # ranks of all groups of a heterogeneous job: SLURM_NTASKS counts one group's
# Role of a rank in a job with roles, the role's first rank and the job's size: RANK and WORLD_SIZE are then the role's.
RLHPC_ROLE = "RLHPC_ROLE"
# Of ranks that are started apart from the job's first ones: the job's number and the local rank of the first of them,
# and how often they were started before in this attempt. Number of the job's ranks on each node: SLURM_NTASKS_PER_NODE
# counts those that are started together.
RLHPC_FIRST_RANK, RLHPC_FIRST_LOCAL_RANK, RLHPC_GENERATION = (
    "RLHPC_FIRST_RANK",
    "RLHPC_FIRST_LOCAL_RANK",
    "RLHPC_GENERATION",
)
RLHPC_RANKS_PER_NODE = "RLHPC_RANKS_PER_NODE"
RLHPC_OWN_CORES = "RLHPC_OWN_CORES"  # set: a rank binds itself to its share of its node
RLHPC_LAUNCHER = "RLHPC_LAUNCHER"  # process id and start of `rlhpc run`, which its ranks do not outlive
RLHPC_NSYS = "RLHPC_NSYS"  # ranks that restart themselves under Nsight Systems, such as 0,8-15
RLHPC_GPU_SECONDS = "RLHPC_GPU_SECONDS"  # set where ranks compute on GPUs: time in which each must answer
SLURM_PROCID = "SLURM_PROCID"
SLURM_NTASKS = "SLURM_NTASKS"
SLURM_LOCALID = "SLURM_LOCALID"
SLURM_JOB_ID = "SLURM_JOB_ID"
SLURM_ARRAY_JOB_ID = "SLURM_ARRAY_JOB_ID"
SLURM_ARRAY_TASK_ID = "SLURM_ARRAY_TASK_ID"
SLURM_STEP_ID = "SLURM_STEP_ID"
SLURM_JOB_NODELIST = "SLURM_JOB_NODELIST"
SLURM_JOB_NUM_NODES = "SLURM_JOB_NUM_NODES"
SLURM_NTASKS_PER_NODE = "SLURM_NTASKS_PER_NODE"
SLURM_CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"
SLURM_GPUS_PER_NODE = "SLURM_GPUS_PER_NODE"
SLURM_GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
SLURM_GPUS_PER_TASK = "SLURM_GPUS_PER_TASK"
SLURM_GPU_BIND = "SLURM_GPU_BIND"
SLURM_NTASKS_PER_GPU = "SLURM_NTASKS_PER_GPU"
SLURM_TRES_BIND = "SLURM_TRES_BIND"
SLURM_TRES_PER_TASK = "SLURM_TRES_PER_TASK"
SLURM_JOB_PARTITION = "SLURM_JOB_PARTITION"
SLURM_CLUSTER_NAME = "SLURM_CLUSTER_NAME"
SLURM_CLUSTERS = "SLURM_CLUSTERS"  # --clusters of all commands
SLURM_HET_SIZE = "SLURM_HET_SIZE"
SLURM_CPUS_ON_NODE = "SLURM_CPUS_ON_NODE"
SLURMD_NODENAME = "SLURMD_NODENAME"
SRUN_CPUS_PER_TASK = "SRUN_CPUS_PER_TASK"
SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
SLURM_EXPORT_ENV = "SLURM_EXPORT_ENV"  # srun's --export; sbatch sets it from its own --export
SBATCH_EXPORT = "SBATCH_EXPORT"

# Threads and network of a rank.
OMP_NUM_THREADS = "OMP_NUM_THREADS"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"
NCCL_SOCKET_MAGIC = "NCCL_SOCKET_MAGIC"  # from 2.30 on: number that opens a connection, otherwise a constant
CUDA_DEVICE_MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # Megatron wants 1 with sequence parallelism

# vLLM, set before it is imported.
VLLM_ENABLE_V1_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0: the engine lives in this process
VLLM_HOST_IP = "VLLM_HOST_IP"  # where ranks of an engine on other nodes reach this one
VLLM_ALLREDUCE_USE_SYMM_MEM = "VLLM_ALLREDUCE_USE_SYMM_MEM"
VLLM_USE_FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"  # 0: vLLM does not import FlashInfer to sample
VLLM_USE_V2_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # 0: vLLM's V1 runner, also on a GPU
NUMBA_NUM_THREADS = "NUMBA_NUM_THREADS"  # of vLLM's search for n-grams
VLLM_NO_USAGE_STATS = "VLLM_NO_USAGE_STATS"
VLLM_LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
DO_NOT_TRACK = "DO_NOT_TRACK"

# HuggingFace libraries: compute nodes have no network, and nothing here may wait for one.
HF_HUB_OFFLINE = "HF_HUB_OFFLINE"
TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"

# PyTorch's compiler costs seconds at start on a CPU and gains nothing in eager engines.
TORCHDYNAMO_DISABLE = "TORCHDYNAMO_DISABLE"

# Folders of a rank on its node.
TMPDIR = "TMPDIR"
HOME = "HOME"
XDG_CACHE_HOME = "XDG_CACHE_HOME"  # HuggingFace's, torch's and vLLM's caches are in there
TRITON_CACHE_DIR = "TRITON_CACHE_DIR"
TORCHINDUCTOR_CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
CUDA_CACHE_PATH = "CUDA_CACHE_PATH"
FLASHINFER_WORKSPACE_BASE = "FLASHINFER_WORKSPACE_BASE"

# All that a program in a sandbox is given; the first is where the interpreter's own libraries may be.
LD_LIBRARY_PATH = "LD_LIBRARY_PATH"
PATH = "PATH"
LANG = "LANG"
OPENBLAS_NUM_THREADS = "OPENBLAS_NUM_THREADS"
MALLOC_ARENA_MAX = "MALLOC_ARENA_MAX"

# Containers: prefixes of options, and of variables that take precedence over the image's; what Enroot shows of GPUs.
APPTAINER = "APPTAINER_"
SINGULARITY = "SINGULARITY_"
APPTAINERENV = "APPTAINERENV_"
SINGULARITYENV = "SINGULARITYENV_"
NVIDIA_VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
NVIDIA_DRIVER_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
RLHPC_CODE = "RLHPC_CODE"  # set in containers: folders of own code
PYTHONNOUSERSITE = "PYTHONNOUSERSITE"
# Variables that name files of the node, which a container does not have.
PYTHONPATH = "PYTHONPATH"
PYTHONHOME = "PYTHONHOME"
PYTHONUSERBASE = "PYTHONUSERBASE"
PYTHONSTARTUP = "PYTHONSTARTUP"
LD_PRELOAD = "LD_PRELOAD"
CXX = "CXX"
CUDA_HOME = "CUDA_HOME"
SSL_CERT_FILE = "SSL_CERT_FILE"
SSL_CERT_DIR = "SSL_CERT_DIR"
REQUESTS_CA_BUNDLE = "REQUESTS_CA_BUNDLE"
CURL_CA_BUNDLE = "CURL_CA_BUNDLE"
XDG_RUNTIME_DIR = "XDG_RUNTIME_DIR"

# Which GPUs a process sees.
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# What the command of an alert gets (observe/alerts/notify.py).
RLHPC_ALERT_RUN = "RLHPC_ALERT_RUN"
RLHPC_ALERT_RULE = "RLHPC_ALERT_RULE"
RLHPC_ALERT_SEVERITY = "RLHPC_ALERT_SEVERITY"
RLHPC_ALERT_MESSAGE = "RLHPC_ALERT_MESSAGE"
RLHPC_ALERT_PHASE = "RLHPC_ALERT_PHASE"
RLHPC_ALERT_STEP = "RLHPC_ALERT_STEP"

# The C compiler of Triton; without it gcc or clang of PATH.
CC = "CC"

# The site file, and where users' configuration is.
RLHPC_SITE = "RLHPC_SITE"  # empty: no site file
RLHPC_COMPLETE = "_RLHPC_COMPLETE"  # set by the completion of a shell (click)
XDG_CONFIG_HOME = "XDG_CONFIG_HOME"

# The commands of Slurm, and where this user's files of state are.
SLURM_CONF = "SLURM_CONF"
SLURM_TIME_FORMAT = "SLURM_TIME_FORMAT"
LC_ALL = "LC_ALL"
CONDA_EXE = "CONDA_EXE"
XDG_STATE_HOME = "XDG_STATE_HOME"

# MLflow's own report of its use, to a server on the internet.
MLFLOW_DISABLE_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
# Address of the service process of W&B that a parent has started.
WANDB_SERVICE = "WANDB_SERVICE"

# Variables that a tracker is given, by name or beginning; none that rlhpc.core.redaction takes for a secret.
RECORDED = frozenset(
    (
        CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS, CUDA_DEVICE_MAX_CONNECTIONS, TORCHDYNAMO_DISABLE, LD_LIBRARY_PATH,
        SLURM_JOB_ID, SLURM_JOB_NODELIST, SLURM_JOB_NUM_NODES, SLURM_JOB_PARTITION, SLURM_CLUSTER_NAME,
        SLURM_NTASKS_PER_NODE, SLURM_CPUS_PER_TASK, SLURM_GPUS_PER_NODE, SLURM_RESTART_COUNT, MALLOC_ARENA_MAX,
        HF_HUB_OFFLINE,
    )
)  # fmt: skip
RECORDED_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_", "NVTE_", "PYTORCH_", "TORCH_NCCL_", "VLLM_")


def of_het_group(name: str, group: int) -> str:
    """The name that a variable of Slurm has for one group of a heterogeneous job, counted from 0."""
    return f"{name}_HET_GROUP_{group}"
