"""vLLM's GPU worker with a seed per token, and a startup whose failure all ranks learn of.

Imported by vLLM only, by the name in ``vllm_arguments.GPU_WORKER``.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker import gpu_worker

from rlhpc.rollout import vllm_memory
from rlhpc.rollout.kept_tokens import RecordsKeptTokens
from rlhpc.rollout.speculation import Speculates
from rlhpc.rollout.token_seeds import batched_noise, seed_tokens


class EngineGpuWorker(RecordsKeptTokens, Speculates, gpu_worker.Worker):
    def init_device(self) -> None:
        """Fails on all ranks if it fails on one; later, ranks would already wait in vLLM's next collective."""
        refused = None
        try:
            super().init_device()
        except ValueError as error:
            refused = error
        vllm_memory.agree(refused, *torch.cuda.mem_get_info())

    def sleep(self, level: int = 1) -> None:
        """vLLM's ends with an assertion that more memory is free; another process on the GPU may have taken some."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if not str(error).startswith("Memory usage increased"):  # gpu_worker.py, Worker.sleep
                raise

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        self.wake_draft(tags)

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        if not self.use_v2_model_runner:
            guessed = scheduler_output.scheduled_spec_decode_tokens
            seed_tokens(self.model_runner, guessed, batched_noise(self.model_runner))
        return output
