"""As many sequences as the configuration was resolved to, run at once in a real engine, which has the configured
arguments of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.api import Request
from rlhpc.config.load import load_config
from rlhpc.config.rollout import RolloutSection
from rlhpc.core.folder import RunFolder
from rlhpc.launch.resolved import resolved
from tests.helpers.distributed import run_ranks
from tests.rollout import engines

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

READY = Path(__file__).parents[2] / "configs" / "ready" / "qwen2.5-7b-1node.yaml"
WAITING = 10
TOKENS = 1000  # of a step, by vLLM's own name: more than all requests have


def running_at_once(path: Path, section: RolloutSection) -> tuple[float, float, int]:
    """Returns the most requests that ran and that waited, and vLLM's limit of tokens in a step."""
    number = section.max_num_seqs
    assert number is not None
    engine = engines.ready(path, max_num_seqs=number, kv_cache_gib=section.kv_cache_gib, engine=section.engine)
    engine.generate([Request((5, i % 190 + 5), seed=i, max_tokens=3, temperature=1.0) for i in range(number + WAITING)])
    found = engine.statistics()
    limit = engines.vllm_engine(engine).vllm_config.scheduler_config.max_num_batched_tokens
    return found["engine/running_requests_max"], found["engine/waiting_requests_max"], limit


def test_the_resolved_number_runs_at_once_with_the_configured_arguments(models: Path, tmp_path: Path) -> None:
    path = models / "qwen2" / "a"
    changes = [f"model.path={path}", "slurm.gpus_per_node=0", "planning.gpu=null", "data.validation=[]"]
    changes += ["data.max_prompt_tokens=8", "rollout.max_response_tokens=64", "planning.prompt_tokens=8"]
    changes += ["planning.response_tokens=40", "rollout.kv_cache_gib=0.0625", "train.prompts_per_step=267"]
    changes += [f"rollout.engine.max_num_batched_tokens={TOKENS}"]
    section = resolved(load_config(READY, changes), RunFolder(tmp_path)).rollout
    assert section.max_num_seqs == 34 * 8  # the samples of an eighth of the prompts: the cache holds more
    assert run_ranks(running_at_once, 1, path, section)[0] == (34 * 8, WAITING, TOKENS)
