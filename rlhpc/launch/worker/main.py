"""A rank's own process, around the trainer.

srun, or `rlhpc run`, starts ``python -m rlhpc.launch.worker.main ATTEMPT_FOLDER [ENTRY]`` on every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.attempts import read_attempt
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.exits import EXIT_STORAGE, read_start, run_recorded, write_exit
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.imports import import_attribute
from rlhpc.core.known_warnings import hide_known_warnings
from rlhpc.core.process import ProcessId, die_with
from rlhpc.core.rank import RankInfo
from rlhpc.core.redaction import guard_output
from rlhpc.core.shown import show
from rlhpc.core.storage import NONE, Patience, StorageError, say, use
from rlhpc.core.store_client import StoreAddress, store_address
from rlhpc.launch.worker.node_check import check_node, check_store, interface_address, network_interface, take_own_cores
from rlhpc.launch.worker.node_folders import hold, release
from rlhpc.launch.worker.nsys import restart_under_nsys

TRAINER = "rlhpc.trainer.main:run_rank"
_FENCE_SECONDS = 5.0


def _begin(attempt: AttemptFolder) -> StopRequest:
    restart_under_nsys(attempt)
    guard_output()
    stop = StopRequest()
    stop.listen()
    return stop


def _run(entry: str, attempt: AttemptFolder, stop: StopRequest) -> None:
    """Calls ``entry`` (package.module:function) with this rank's context, and writes records of start and end."""
    faulthandler.enable()
    info = RankInfo.from_environ()
    info.export()
    end_former(attempt, info)
    _end_when_superseded(attempt)
    record = read_attempt(attempt)
    assert record is not None, f"{attempt.record} is written before ranks start"
    use(Patience(record.storage_wait_seconds))
    heartbeat = Heartbeat(
        attempt.heartbeats,
        info.job_rank,
        world_size=info.job_size,
        hang_timeout_seconds=record.hang_timeout_seconds,
        store=_store(),
    ).start()
    done = threading.Event()
    atexit.register(_end_now, done)  # registered first, called last
    context = RankContext(attempt, info, stop, heartbeat)
    heartbeat.enter("importing")
    hide_known_warnings()
    try:
        run_recorded(attempt.exits, info, lambda: import_attribute(entry, "trainer")(context))
    except UserError:
        raise
    except Exception:
        sys.exit(1)  # its traceback is in the log
    finally:
        heartbeat.stop()
    done.set()


def _store() -> StoreAddress | None:
    """Address of the job's store; None if it is not usable, which the rank reports when it joins the others."""
    with contextlib.suppress(UserError):
        return store_address()
    return None


def _stay_with(launcher: ProcessId) -> None:
    """Makes a rank of `rlhpc run`, which has checked this machine, end with it."""
    with contextlib.suppress(PermissionError):  # it leads a session already, unless nsys does
        os.setsid()
    die_with(launcher)
    hold(os.environ[env.TMPDIR])


def _prepare_node(attempt: AttemptFolder) -> None:
    """Checks the node and finds its network interface, before anything heavy is imported. Raises UserError."""
    info = RankInfo.from_environ()
    ranks_here = int(os.environ.get(env.RLHPC_RANKS_PER_NODE) or os.environ.get(env.SLURM_NTASKS_PER_NODE, "1"))
    take_own_cores(info.local_rank, ranks_here)
    try:
        check_node(
            attempt.run.path,
            info.master_addr,
            ranks_here=ranks_here,
            local_rank=info.local_rank,
            attempt=attempt.number,
        )
        if info.local_rank == 0:
            check_store()
        if env.GLOO_SOCKET_IFNAME not in os.environ:
            alone = info.job_size <= ranks_here
            os.environ[env.GLOO_SOCKET_IFNAME] = network_interface(info.master_addr, single_node=alone)
            os.environ.setdefault(env.NCCL_SOCKET_IFNAME, os.environ[env.GLOO_SOCKET_IFNAME])
        address = interface_address(os.environ[env.GLOO_SOCKET_IFNAME].partition(",")[0])
        if address is not None:
            # vLLM would take the interface to the internet, or an address that no other node can reach. A value from
            # the submission is ignored: it would be the same on all nodes.
            os.environ[env.VLLM_HOST_IP] = address
    except UserError as error:
        with contextlib.suppress(OSError):
            write_exit(attempt.exits, info, error)
        raise


def end_former(attempt: AttemptFolder, info: RankInfo) -> None:
    """Kills children of the process that was this rank before in the attempt, on the same node. Those that outlive it,
    where Slurm does not track them, hold connections and GPU memory."""
    if info.generation:
        former = read_start(attempt.former_exits(info.generation - 1), info.job_rank)
        if former is not None and former.node == info.node:
            former.process.kill_group()


def _end_when_superseded(attempt: AttemptFolder) -> None:
    """Kills this process soon after a later attempt exists: nobody else may be able to reach it."""
    own = ProcessId.own()

    def is_current() -> bool:
        try:
            return attempt.is_current(NONE)
        except OSError:
            return True  # unknown; nothing can be written now, and the next look is soon

    def watch() -> None:
        while is_current():
            time.sleep(_FENCE_SECONDS)
        show(f"a later attempt than {attempt.path.name} exists: this rank ends", file=sys.stderr)
        own.kill_group()

    threading.Thread(target=watch, name="fence", daemon=True).start()


def _end_now(done: threading.Event) -> None:
    """Ends a rank without freeing what torch and vLLM hold: that takes many seconds, and NCCL's threads may call into
    the interpreter during its shutdown."""
    for child in multiprocessing.active_children():  # Megatron's saves leave one that does not end by itself
        child.kill()
    release()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # the log may be on a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0 if done.is_set() else 1)


def main(attempt: AttemptFolder, entry: str = TRAINER) -> None:
    """A rank. A UserError is one line, even if it cannot be recorded in the run folder."""
    stop = _begin(attempt)
    try:
        if launcher := os.environ.pop(env.RLHPC_LAUNCHER, ""):
            _stay_with(ProcessId(*map(int, launcher.split())))
        else:
            _prepare_node(attempt)
        _run(entry, attempt, stop)
    except UserError as error:
        show(f"rlhpc: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except StorageError as error:
        say(str(error))
        sys.exit(EXIT_STORAGE)


if __name__ == "__main__":
    main(AttemptFolder(Path(sys.argv[1])), *sys.argv[2:])
