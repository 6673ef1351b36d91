"""Slurm's ways to write times."""

from datetime import datetime

import pytest

from rlhpc.launch.slurm.commands import clock, seconds_of, time_of
from rlhpc.launch.slurm.partitions import in_slurm_words


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        (30, 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("7-00:00:01", 604801),
        ("0:09", 9),
        *[(word, None) for word in ("UNLIMITED", "infinite", "NOT_SET", "INVALID", "N/A", "", "1:2:3:4", "-5", "1-")],
    ],
)
def test_durations(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("seconds", [59, 3600, 86400, 90061])
def test_what_is_written_is_read_back(seconds):
    assert seconds_of(in_slurm_words(seconds)) == seconds


def test_moments():
    assert time_of("2026-11-21T11:17:08") == datetime(2026, 11, 21, 11, 17, 8).timestamp()
    assert [time_of(word) for word in ("N/A", "Unknown", "None", "")] == [None] * 4


def test_a_moment_of_another_day_has_its_date():
    now = datetime(2026, 11, 21, 23, 0).timestamp()
    assert clock(now + 60, now) == "23:01"
    assert clock(now + 7200, now) == "Sun 22 Nov 01:00"
