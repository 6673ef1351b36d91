"""Process-wide state that vLLM's startup changes."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

from rlhpc.core import env
from rlhpc.parallel.compat import thread_setter_restored
from rlhpc.rollout import vllm_memory

_LAUNCHER_VARIABLES = (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE)


@contextlib.contextmanager
def process_state_restored() -> Iterator[None]:
    """Restores process-wide state that vLLM's startup changes and the trainer relies on.

    vLLM reseeds all random generators, makes ``torch.set_num_threads`` a no-op (CPU), overwrites LOCAL_WORLD_SIZE, and
    resets PyTorch's allocator options (0.25).
    """
    environ = dict(os.environ)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        settings = vllm_memory.allocator_settings_restored()
        with torch.random.fork_rng(devices=devices), settings, thread_setter_restored():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for name in _LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environ)
