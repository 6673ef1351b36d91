"""Times GRPO steps of TRL's GRPOTrainer on the CPU and prints a JSON document. Runs in the bench environment.

    python -m bench.trl_step tiny MODEL_FOLDER --steps 4
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.trl_step 30m MODEL_FOLDER --threads 1

Settings are TRL's defaults except for what makes it faster here: float32 (default: bfloat16 mixed precision), no
gradient checkpointing, dropout, logging or saving. TRL skips the old log-probs itself, because a step is one update.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.workload import KL_COEFFICIENT, LEARNING_RATE, SEED, WORKLOADS, Workload, parity

PACKAGES = ("torch", "trl", "transformers", "accelerate", "datasets")


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that sums the seconds of its parts and the completion tokens of this process."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.totals = {"generate_seconds": 0.0, "log_probs_seconds": 0.0, "completion_tokens": 0}

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> tuple:
        began = time.perf_counter()
        completions, log_probs = super()._generate_single_turn(*arguments, **keywords)
        self.totals["generate_seconds"] += time.perf_counter() - began
        self.totals["completion_tokens"] += sum(len(completion) for completion in completions)
        return completions, log_probs

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> tuple:
        if torch.is_grad_enabled():  # part of the update
            return super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        began = time.perf_counter()
        output = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        self.totals["log_probs_seconds"] += time.perf_counter() - began
        return output


class StepRecorder(TrainerCallback):
    """Times steps from the end of one to the end of the next, so that the time between steps counts."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        self.mark()

    def mark(self) -> None:
        assert self.trainer is not None
        self.start, self.cpu_start, self.before = time.perf_counter(), time.process_time(), dict(self.trainer.totals)

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        assert self.trainer is not None
        parts = {key: value - self.before[key] for key, value in self.trainer.totals.items()}
        seconds = time.perf_counter() - self.start
        parts["update_seconds"] = seconds - parts["generate_seconds"] - parts["log_probs_seconds"]
        self.steps.append({"seconds": seconds, "cpu_seconds": time.process_time() - self.cpu_start, **parts})
        self.mark()


def reward(completions: list[str], **_: Any) -> list[float]:
    return [parity(completion) for completion in completions]


def configure(workload: Workload, micro_batch: int, steps: int, output: str, *, continuous: bool) -> GRPOConfig:
    """Config with one update per step, on all samples of the step."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        seed=SEED,
        max_steps=steps,
        num_generations=workload.samples_per_prompt,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=workload.samples_per_step // (micro_batch * processes),
        max_completion_length=workload.max_response,
        temperature=1.0,
        shuffle_dataset=False,
        use_transformers_continuous_batching=continuous,
        beta=KL_COEFFICIENT,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        disable_dropout=True,
        ddp_find_unused_parameters=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )


def measure(workload: Workload, model: str, config: GRPOConfig) -> list[dict[str, float]]:
    """Per step: seconds, seconds of its parts on the first process, and completion tokens of all processes."""
    prompts = workload.prompts(workload.prompts_per_step * config.max_steps)
    recorder = StepRecorder()
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    trainer.train()
    if torch.distributed.is_initialized():
        tokens = torch.tensor([[step["completion_tokens"], step["cpu_seconds"]] for step in recorder.steps]).double()
        torch.distributed.all_reduce(tokens)
        for step, (completion_tokens, cpu_seconds) in zip(recorder.steps, tokens.tolist(), strict=True):
            step.update(completion_tokens=int(completion_tokens), cpu_seconds=cpu_seconds)
    return recorder.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("model", help="folder that bench.models wrote")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--warmup", type=int, default=1, help="untimed steps before them")
    parser.add_argument("--threads", type=int, default=2, help="threads per process")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences per microbatch")
    parser.add_argument("--continuous", action="store_true", help="generate with transformers' continuous batching")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    workload = WORKLOADS[arguments.workload]
    steps = arguments.warmup + arguments.steps
    with tempfile.TemporaryDirectory() as output:
        config = configure(workload, arguments.micro_batch, steps, output, continuous=arguments.continuous)
        records = measure(workload, arguments.model, config)
    result = {
        "system": "trl",
        "model": workload.name,
        "processes": config.world_size,
        "threads": arguments.threads,
        "micro_batch": arguments.micro_batch,
        "continuous": arguments.continuous,
        "versions": {package: version(package) for package in PACKAGES},
        "steps": records[arguments.warmup :],
    }
    if config.process_index == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
