"""vLLM's GPU worker with a seed for each token. Imported by vLLM only, by the name in ``vllm_arguments.GPU_WORKER``."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import gpu_worker

from rlhpc.rollout.token_seeds import seed_tokens


class Worker(gpu_worker.Worker):
    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        if not self.use_v2_model_runner:
            seed_tokens(self.model_runner)
        return output
