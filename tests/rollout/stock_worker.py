"""vLLM's own loading from disk under our shared-memory names: its own ones collide between runs on one machine."""

from vllm.v1.worker.cpu_worker import CPUWorker

from rlhpc.rollout.vllm_cpu import EngineCpuWorker


class StockWorker(EngineCpuWorker):
    load_model = CPUWorker.load_model
