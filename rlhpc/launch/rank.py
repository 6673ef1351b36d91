"""What runs in a rank's own process, around the trainer."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.exits import run_recorded
from rlhpc.core.folder import RunFolder
from rlhpc.core.imports import import_attribute
from rlhpc.core.process import ProcessId, die_with
from rlhpc.core.rank import RankInfo


def run_rank(entry: str, run_dir: str, resume: bool, launcher: ProcessId, visible_devices: str | None) -> None:
    """Call ``entry`` (package.module:function) as entry(run_dir, resume), leaving records of start and end.

    The process leads a session of its own, so that a terminal's Ctrl-C reaches only the launcher and so that its
    children can be ended with it; it does not outlive the launcher. ``visible_devices`` is CUDA_VISIBLE_DEVICES as
    the launcher found it, None if unset: every rank sees every GPU and takes the one of its local rank.
    """
    os.setsid()
    die_with(launcher)
    faulthandler.enable()
    os.environ.pop(env.CUDA_VISIBLE_DEVICES, None)
    if visible_devices is not None:
        os.environ[env.CUDA_VISIBLE_DEVICES] = visible_devices
    info = RankInfo.from_environ()
    os.environ[env.RANK] = str(info.rank)
    os.environ[env.WORLD_SIZE] = str(info.world_size)
    os.environ[env.LOCAL_RANK] = str(info.local_rank)
    done = threading.Event()
    atexit.register(_end_now, done)  # the first to be registered is the last to be called
    folder = RunFolder(Path(run_dir))
    run_recorded(folder.exits, info, lambda: import_attribute(entry, "trainer")(run_dir, resume))
    done.set()


def _end_now(done: threading.Event) -> None:
    """End a rank that is done without freeing all that torch and vLLM hold: that takes Python many seconds."""
    if done.is_set():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
