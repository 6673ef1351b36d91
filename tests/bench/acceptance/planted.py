"""Real parts with planted faults in the code under measurement."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from bench.acceptance.part import Context

WRONG = "model.layers.1.self_attn.o_proj.weight"
PAUSE_SECONDS = 2.0


def wrong_weight(context: Context) -> None:
    """Each weight sync leaves a zeroed tensor in the engine."""
    from bench.acceptance.parts import correctness
    from rlhpc.reshard.manager import ReshardManager

    def spoil(self: Any) -> None:
        write(self)
        self._parameters[WRONG].zero_()

    write, ReshardManager.write = ReshardManager.write, spoil
    correctness.check(context, "dense")


def slow_sync(context: Context) -> None:
    """Each weight sync takes two extra seconds."""
    from bench.acceptance.parts import weight_sync
    from rlhpc.reshard.manager import ReshardManager

    def linger(self: Any) -> None:
        time.sleep(PAUSE_SECONDS)
        write(self)

    write, ReshardManager.write = ReshardManager.write, linger
    weight_sync.measure(context, "tiny")


def crash(context: Context) -> None:
    """Dies during the engine's startup."""
    from bench.acceptance.parts.install import run
    from rlhpc.rollout.vllm_engine import VllmEngine

    def die(self: Any, *_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    VllmEngine.__init__ = die  # type: ignore[method-assign]
    run(context)


def other_seed(context: Context) -> None:
    """The killed and resumed dense run has another seed than the uninterrupted one."""
    from bench.acceptance.parts import recovery

    def changed(context: Context, name: str, *arguments: Any, **options: Any) -> Any:
        config = made(context, name, *arguments, **options)
        return config.model_copy(update={"seed": 1}) if name == "dense-resumed" else config

    made, recovery.run_config = recovery.run_config, changed
    recovery.run_dense(context)
