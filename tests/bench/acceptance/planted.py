"""Real parts with planted faults in the code under measurement."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from bench.acceptance.results import Context

WRONG = "model.layers.1.self_attn.o_proj.weight"
PAUSE_SECONDS = 2.0


def wrong_weight(context: Context) -> None:
    """Each weight sync leaves a zeroed tensor in the engine."""
    from bench.acceptance import weights
    from rlhpc.reshard.manager import ReshardManager

    def spoil(self: Any) -> None:
        write(self)
        self._parameters[WRONG].zero_()

    write, ReshardManager.write = ReshardManager.write, spoil
    weights.check(context, "dense")


def slow_sync(context: Context) -> None:
    """Each weight sync takes two extra seconds."""
    from bench.acceptance import weights
    from rlhpc.reshard.manager import ReshardManager

    def linger(self: Any) -> None:
        time.sleep(PAUSE_SECONDS)
        write(self)

    write, ReshardManager.write = ReshardManager.write, linger
    weights.measure(context, "tiny")


def crash(context: Context) -> None:
    """Dies during the engine's startup."""
    from bench.acceptance.install import run
    from rlhpc.rollout.vllm_engine import VllmEngine

    def die(self: Any, *_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    VllmEngine.__init__ = die  # type: ignore[method-assign]
    run(context)


def other_seed(context: Context) -> None:
    """The killed and resumed dense run has another seed than the uninterrupted one."""
    from bench.acceptance import runs

    def changed(context: Context, name: str, *arguments: Any, **options: Any) -> Any:
        config = made(context, name, *arguments, **options)
        return config.model_copy(update={"seed": 1}) if name == "dense-resumed" else config

    made, runs.recovery_config = runs.recovery_config, changed
    runs.run_dense(context)
