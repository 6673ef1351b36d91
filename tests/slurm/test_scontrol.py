"""What Slurm's commands print, read."""

from tests.slurm.scontrol import parse_job


def test_values_with_spaces_are_read() -> None:
    line = "JobId=7 JobName=a b=c JobState=RUNNING NtasksPerN:B:S:C=0:0:*:* Command=/tmp/a b.sh  Power= "
    assert parse_job(line) == {
        "JobId": "7",
        "JobName": "a",
        "b": "c",
        "JobState": "RUNNING",
        "NtasksPerN:B:S:C": "0:0:*:*",
        "Command": "/tmp/a b.sh",
        "Power": "",
    }
