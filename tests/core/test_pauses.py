"""The time in which a process is suspended, measured by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys, time
from rlhpc.core import process
process._TICK_SECONDS, process._LATE_SECONDS = 0.05, 0.5
watched = process.Pauses()
sys.setswitchinterval(10)  # a thread that computes lets no other run
print(flush=True)
sys.stdin.readline()
until = time.process_time() + 1.5
while time.process_time() < until:
    pass
time.sleep(0.3)
print(watched.seconds, watched.just_ended)
"""


@pytest.mark.workers
def test_a_suspension_is_a_pause_and_work_is_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.2)
    child.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    child.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    out, _ = child.communicate("\n", timeout=100)
    seconds, just_ended = out.split()
    assert 1.2 < float(seconds) < 2.5, "1.5 of the suspension"
    assert just_ended == "True"
