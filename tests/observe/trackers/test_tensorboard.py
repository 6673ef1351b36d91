"""TensorBoard reads back what was written, each step once, also after resumes and kills."""

from __future__ import annotations

import json
import os
import struct
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

from rlhpc.core.folder import RunFolder
from rlhpc.core.histograms import Histogram, StepHistograms
from rlhpc.observe.trackers.delivery import Delivery
from rlhpc.observe.trackers.delivery import board as made
from tests.observe.trackers.steps import append, new_run, record, replace, steps


def board(folder: RunFolder) -> Delivery:
    return Delivery(folder, "tensorboard", partial(made, folder))


def deliver(folder: RunFolder) -> None:
    """A process of its own, from beginning to end, ten seconds after the former one by the names of files."""
    for file in list(folder.tensorboard.glob("events.out.tfevents.*")):
        second = file.name.split(".")[3]
        file.rename(file.with_name(file.name.replace(second, f"{int(second) - 10:010d}", 1)))
    board(folder).deliver(last=True)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = new_run(tmp_path)
    folder.trackers.path.mkdir()
    return folder


def shown(folder: RunFolder, tag: str) -> list[tuple[int, float, float]]:
    """(place, time, value) of a metric, as TensorBoard's own reader has it."""
    events = EventAccumulator(str(folder.tensorboard), STORE_EVERYTHING_SIZE_GUIDANCE)
    events.Reload()
    return [(event.step, event.wall_time, event.value) for event in events.Scalars(tag)]


def expected(records: list[dict], tag: str, sft: int = 3) -> list[tuple[int, float, float]]:
    """Values are float32 in event files."""
    phase, _, name = tag.partition("/")
    single = struct.Struct("f")
    return [
        (one["step"] + (sft if phase == "rl" else 0), one["time"], single.unpack(single.pack(one[name]))[0])
        for one in records
        if one["phase"] == phase
    ]


def check(folder: RunFolder, records: list[dict]) -> None:
    for tag in ("sft/loss", "sft/perf/step_seconds", "rl/loss", "rl/validation/pass@1", "rl/perf/step_seconds"):
        assert shown(folder, tag) == expected(records, tag), tag


def test_a_thousand_steps_are_read_back_equal(folder: RunFolder):
    written, tracker = steps(3, 1000), board(folder)
    for first in range(0, len(written), 37):
        append(folder, written[first : first + 37])
        tracker.deliver()
    tracker.deliver(last=True)
    check(folder, written)


@pytest.mark.parametrize("kept", [-1, 4])
def test_steps_taken_again_are_there_once_with_their_new_values(folder: RunFolder, kept: int):
    """Also the first validation, which has the place of the last supervised step."""
    append(folder, steps(3, 6))
    tracker = board(folder)
    tracker.deliver()
    replace(folder, steps(3, kept))
    tracker.deliver()
    again = [record("rl", step, 2000.0) for step in range(kept + 1, 8)]
    append(folder, again)
    tracker.deliver()
    check(folder, [*steps(3, kept), *again])


def test_a_file_that_was_replaced_between_two_looks_is_recognized(folder: RunFolder):
    """The first validation has the place of the last supervised step."""
    append(folder, steps(3, 2))
    tracker = board(folder)
    tracker.deliver()
    new = [*steps(3, -1), *(record("rl", step, 2000.0) for step in range(6))]
    replace(folder, new)
    tracker.deliver()
    check(folder, new)


@pytest.mark.parametrize("sft", [0, 3])
def test_a_resumed_process_continues(folder: RunFolder, sft: int):
    append(folder, steps(sft, 3))
    deliver(folder)
    files = len(list(folder.tensorboard.iterdir()))
    deliver(folder)
    assert len(list(folder.tensorboard.iterdir())) == files  # nothing new, nothing written
    append(folder, [record("rl", step) for step in (4, 5)])
    deliver(folder)
    assert shown(folder, "rl/loss") == expected(steps(sft, 5), "rl/loss", sft)
    assert shown(folder, "sft/loss") == expected(steps(3, 5), "sft/loss") if sft else True


def test_steps_taken_again_while_no_process_looked(folder: RunFolder):
    append(folder, steps(3, 6))
    deliver(folder)
    new = [*steps(3, 4), *(record("rl", step, 2000.0) for step in (5, 6, 7))]
    replace(folder, new)
    deliver(folder)
    check(folder, new)


def test_what_a_killed_process_wrote_after_its_state_is_there_once(folder: RunFolder):
    append(folder, steps(3, 2))
    deliver(folder)
    remembered = folder.trackers.state("tensorboard").read_bytes()
    append(folder, [record("rl", 3)])
    deliver(folder)
    folder.trackers.state("tensorboard").write_bytes(remembered)
    events = max(folder.tensorboard.iterdir())
    with open(events, "ab") as file:
        file.write(events.read_bytes()[:30])  # half an event
    append(folder, [record("rl", 4)])
    deliver(folder)
    check(folder, steps(3, 4))


def test_a_new_process_after_the_warm_up_hides_none_of_its_steps(folder: RunFolder):
    """The first validation has the place of the last supervised step, from which on the new file hides the old one."""
    append(folder, steps(3, -1))
    deliver(folder)
    append(folder, [record("rl", step) for step in range(3)])
    deliver(folder)
    check(folder, steps(3, 2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
def test_a_full_disk_loses_nothing_once_there_is_space(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    append(folder, steps(3, 2))
    tracker = board(folder)
    tracker.deliver()
    (events,) = folder.tensorboard.iterdir()
    kept = events.with_name("kept")
    os.rename(events, kept)
    events.symlink_to("/dev/full")
    append(folder, [record("rl", 3)])
    with pytest.raises(OSError, match="No space"):
        tracker.deliver()
    os.replace(kept, events)
    tracker.deliver()
    check(folder, steps(3, 3))


def test_values_that_are_no_numbers_are_left_out(folder: RunFolder):
    append(folder, [record("rl", 1, odd="text", none=None, yes=True, inf=float("inf"))])
    deliver(folder)
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["rl/inf", "rl/loss", "rl/perf/step_seconds", "rl/validation/pass@1"]


def test_files_of_an_earlier_writer_are_hidden_not_doubled(folder: RunFolder):
    append(folder, steps(3, 4))
    deliver(folder)
    folder.trackers.state("tensorboard").unlink()
    deliver(folder)
    check(folder, steps(3, 4))


def test_names_of_two_files_differ_in_their_second(folder: RunFolder):
    """TensorBoard reads files in the order of their names."""
    for step in (1, 2):
        append(folder, [record("rl", step)])
        board(folder).deliver(last=True)
    assert len({file.name.split(".")[3] for file in folder.tensorboard.iterdir()}) == 2


def test_a_run_without_steps_makes_no_files(folder: RunFolder):
    deliver(folder)
    assert not folder.tensorboard.exists()


def append_histograms(folder: RunFolder, *rl_steps: int, low: float = 0.0) -> None:
    lines = [
        StepHistograms(step, 5.0, {"reward": Histogram(low, low + 1, (step, 0, 5), step + 5)}) for step in rl_steps
    ]
    with open(folder.histograms, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line.to_json()) + "\n" for line in lines)


def shown_histograms(folder: RunFolder) -> list[tuple[int, float, list[float]]]:
    """(place, lowest value, counts) of the rewards' histograms."""
    events = EventAccumulator(str(folder.tensorboard), STORE_EVERYTHING_SIZE_GUIDANCE)
    events.Reload()
    found = [(event.step, event.histogram_value) for event in events.Histograms("rl/reward")]
    return [(place, value.min, list(value.bucket)) for place, value in found]


def test_histograms_are_there_once_although_they_come_after_the_metrics(folder: RunFolder):
    append(folder, steps(3, 3))
    append_histograms(folder, 1, 2)
    tracker = board(folder)
    tracker.deliver()
    append_histograms(folder, 3)
    append(folder, [record("rl", 4)])
    tracker.deliver()
    append_histograms(folder, 4)
    tracker.deliver(last=True)
    wanted = [(3 + step, 0.0, [step, 0, 5]) for step in (1, 2, 3, 4)]
    assert shown_histograms(folder) == wanted
    append(folder, [record("rl", 5)])  # another process repeats the last step
    append_histograms(folder, 5)
    deliver(folder)
    assert shown_histograms(folder) == [*wanted, (8, 0.0, [5, 0, 5])]
    check(folder, steps(3, 5))


def test_histograms_of_steps_taken_again_replace_the_earlier_ones(folder: RunFolder):
    append(folder, steps(3, 4))
    append_histograms(folder, 1, 2, 3, 4)
    tracker = board(folder)
    tracker.deliver()
    replace(folder, [*steps(3, 2), *(record("rl", step, 2000.0) for step in (3, 4))])
    folder.histograms.unlink()
    append_histograms(folder, 1, 2)
    append_histograms(folder, 3, 4, low=7.0)
    tracker.deliver(last=True)
    assert [(place, low) for place, low, _ in shown_histograms(folder)] == [(4, 0.0), (5, 0.0), (6, 7.0), (7, 7.0)]
