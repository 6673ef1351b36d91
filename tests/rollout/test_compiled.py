"""An engine whose model is compiled generates what one without compilation does, with the weights of each sync."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Request
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.launch.machine import backend_environment
from rlhpc.rollout.vllm_arguments import check_compilation
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.engines import PROMPTS


def generate(folder: Path) -> dict[str, Any]:
    """Results with weights a, b and a again, without compilation and with it."""
    requests = [Request(prompt, seed=i, max_tokens=24, temperature=1.0) for i, prompt in enumerate(PROMPTS * 2)]
    found: dict[str, Any] = {}
    for compiled in (False, True):
        engine = engines.build(folder / "a", compile=compiled)
        modes = engines.vllm_engine(engine).vllm_config.compilation_config.mode
        results = []
        for letter in "aba":
            engines.sync(engine, folder / letter)
            results.append(engines.results(engine.generate(requests)))
            engine.sleep()
        engine.shutdown()
        found["compiled" if compiled else "plain"] = results
        found[f"mode {compiled}"] = int(modes)
    return found


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.long
@engines.cpu_only
def test_new_weights_reach_a_compiled_model(models: Path, tmp_path: Path) -> None:
    environ = {env.TORCHDYNAMO_DISABLE: "0", "VLLM_CACHE_ROOT": str(tmp_path)}
    (found,) = run_ranks(generate, 1, models / "qwen3", environ=environ)
    assert found["mode True"] > 0 == found["mode False"]
    first, other, again = found["compiled"]
    assert first == again, "bit for bit"
    assert first != other
    for compiled, plain in zip(found["compiled"], found["plain"], strict=True):
        for (tokens, log_probs), (expected, expected_log_probs) in zip(compiled, plain, strict=True):
            assert tokens == expected
            np.testing.assert_allclose(log_probs, expected_log_probs, atol=1e-5)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({env.TORCHDYNAMO_DISABLE: "1"}, "rollout.compile: TORCHDYNAMO_DISABLE=1 forbids to compile; set"),
        ({env.PATH: "/none"}, "rollout.compile: no compiler (g++ or clang++) in PATH; load a module"),
        ({env.CXX: "/none/c++"}, "rollout.compile: CXX=/none/c++ is not a program; load a module"),
    ],
)
def test_a_process_that_cannot_compile_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_compilation({env.PATH: os.environ["PATH"], **environ})
    assert str(error.value).startswith(message)
    check_compilation({env.PATH: os.environ["PATH"], env.TORCHDYNAMO_DISABLE: "0"})


@pytest.mark.parametrize(("compiled", "gpus", "found"), [(True, False, "0"), (False, False, None), (True, True, None)])
def test_ranks_on_cpus_may_compile_only_for_it(compiled: bool, gpus: bool, found: str | None) -> None:
    config = RunConfig(
        name="x", model={"path": "m"}, train={"steps": 1, "backend": "megatron"}, rollout={"compile": compiled}
    )
    assert backend_environment(config, gpus=gpus).get(env.TORCHDYNAMO_DISABLE) == found
