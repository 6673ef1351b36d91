"""What srun's output says of the ranks of a step."""

from __future__ import annotations

from rlhpc.launch.supervise.diagnosis import TASKS
from rlhpc.launch.supervise.step_ranks import with_job_ranks

OUTPUT = """srun: error: node2: tasks 0,2-3: Killed
srun: error: node2: task 1: Out Of Memory
srun: error: task 0 launch failed: Slurmd could not connect IO
slurmstepd: error: task 0 of something else
"""


def test_ranks_have_the_job_s_numbers() -> None:
    assert with_job_ranks(OUTPUT, 0) == OUTPUT
    shifted = with_job_ranks(OUTPUT, 6)
    assert [match[2] for match in TASKS.finditer(shifted)] == ["6,8,9", "7"]
    assert "srun: error: task 6 launch failed: Slurmd could not connect IO" in shifted
    assert "slurmstepd: error: task 0 of something else" in shifted
