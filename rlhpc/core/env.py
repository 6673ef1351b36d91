"""Every environment variable that rlhpc reads or writes, named once."""

from __future__ import annotations

# Who this process is. Set by our launcher, by torchrun, or derived from Slurm's and submitit's own.
RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # vLLM overwrites it with its tensor-parallel size
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
SLURM_PROCID = "SLURM_PROCID"
SLURM_NTASKS = "SLURM_NTASKS"
SLURM_LOCALID = "SLURM_LOCALID"
SLURM_JOB_ID = "SLURM_JOB_ID"
SLURM_STEP_ID = "SLURM_STEP_ID"
SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
SUBMITIT_EXECUTOR = "SUBMITIT_EXECUTOR"
SUBMITIT_LOCAL_GLOBALID = "SUBMITIT_LOCAL_GLOBALID"
SUBMITIT_LOCAL_NTASKS = "SUBMITIT_LOCAL_NTASKS"
SUBMITIT_LOCAL_LOCALID = "SUBMITIT_LOCAL_LOCALID"
SUBMITIT_LOCAL_JOB_ID = "SUBMITIT_LOCAL_JOB_ID"

# Threads and network of a rank.
OMP_NUM_THREADS = "OMP_NUM_THREADS"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
CUDA_DEVICE_MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # Megatron wants 1 with sequence parallelism

# vLLM, set before it is imported.
VLLM_ENABLE_V1_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0: the engine lives in this process
VLLM_NO_USAGE_STATS = "VLLM_NO_USAGE_STATS"
VLLM_LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
DO_NOT_TRACK = "DO_NOT_TRACK"

# HuggingFace libraries: compute nodes have no network, and nothing here may wait for one.
HF_HUB_OFFLINE = "HF_HUB_OFFLINE"
TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"

# PyTorch's compiler costs seconds at start on a CPU and gains nothing in eager engines.
TORCHDYNAMO_DISABLE = "TORCHDYNAMO_DISABLE"

# Which GPUs a process sees. submitit's local launcher overwrites it.
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
