"""TensorBoard's event files, written by its own writer, which loads no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rlhpc.core.files import make_folder, names_in, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.histograms import StepHistograms, histograms_of
from rlhpc.core.records import PHASES, MetricsFile, Position
from rlhpc.core.storage import patiently
from rlhpc.observe.trackers.steps import Outcome, Step, Tracker, read_state


class TensorBoard(Tracker):
    """Event files of a run, in the folder ``tensorboard``.

    Where steps come again, a START event makes TensorBoard skip the earlier events from that step on. A new process
    repeats the last step that was remembered after its events were on disk: START hides what a killed one wrote since.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._writer: EventFileWriter | None = None
        self._read: list[Step] = []  # the last one, and the last supervised one
        self._histograms = MetricsFile(run.histograms).follow()
        self._shown = -1  # the last step whose histograms are written
        self._waiting: list[StepHistograms] = []  # for their steps

    def log(self, steps: Sequence[Step], again: Position | None) -> None:
        """Writes the steps that are new or have been taken again, and histograms, which follow their steps."""
        known = [*(step for step in self._read if again is None or step.position < again), *steps]
        new = self._new(steps) if self._writer is None else list(steps)
        if new and (self._writer is None or again is not None):
            first = min(step.place for step in (*self._read[-1:], new[0]))
            new = [step for step in known if step.place >= first]  # both phases may have this place
            self._start(new)
        supervised = [step for step in known if step.phase == PHASES[0]]
        self._read = [*supervised[-1:], *(step for step in known[-1:] if step.phase != PHASES[0])]
        if self._writer is None:
            return
        for step in new:
            event = Event(wall_time=step.time, step=step.place)
            for name, value in step.metrics.items():
                event.summary.value.add(tag=name, simple_value=value)
            self._writer.add_event(event)
        self._add_histograms(self._writer)
        self._writer.flush()
        if new:
            state = {"phase": new[-1].phase, "step": new[-1].step, "time": new[-1].time}
            write_json(self._run.trackers.state("tensorboard"), state)

    def close(self, outcome: Outcome) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()

    def _new(self, steps: Sequence[Step]) -> list[Step]:
        """Steps since the remembered one, with it; those recorded after it if it was taken again."""
        state = read_state(self._run, "tensorboard")
        if not state:
            return list(steps)
        last = PHASES.index(state["phase"]), state["step"]
        for number, step in enumerate(steps):
            if (step.position, step.time) == (last, state["time"]):
                return list(steps[number:]) if number + 1 < len(steps) else []
        return [step for step in steps if step.time > state["time"] or step.position > last]

    def _start(self, new: Sequence[Step]) -> None:
        """Hides earlier events from the first new step on."""
        if self._writer is None:
            make_folder(self._run.tensorboard)
            make_folder(self._run.trackers.path)
            now = f"events.out.tfevents.{int(time.time()):010d}"
            if names_in(self._run.tensorboard, "events.out.tfevents.*")[-1:] >= [now]:
                time.sleep(1.0)  # TensorBoard reads files in the order of their names, which have the second
            self._writer = EventFileWriter(str(self._run.tensorboard))
        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=new[0].place, session_log=log))
        self._histograms, self._waiting = MetricsFile(self._run.histograms).follow(), []
        self._shown = min((step.step for step in new if step.phase == "rl"), default=0) - 1

    def _add_histograms(self, writer: EventFileWriter) -> None:
        """Writes the histograms of RL steps that were read."""
        last = self._read[-1] if self._read else None
        if last is None or last.phase != "rl":
            return
        found = [*self._waiting, *histograms_of(patiently(self._histograms.read, self._run.histograms)[0])]
        for one in found:
            if self._shown < one.step <= last.step:
                writer.add_event(_histograms(one, last.place - last.step + one.step))
                self._shown = one.step
        self._waiting = [one for one in found if one.step > last.step]


def _histograms(step: StepHistograms, place: int) -> Any:
    """Event of a step's histograms. Sums are those of values in the middle of their bins."""
    event = Event(wall_time=step.time, step=place)
    for name, histogram in step.histograms.items():
        middles = [((low + high) / 2, count) for low, high, count in histogram.bins]
        event.summary.value.add(tag=f"rl/{name}").histo.CopyFrom(
            HistogramProto(
                min=histogram.edges[0],
                max=histogram.edges[-1],
                num=sum(histogram.counts),
                sum=sum(value * count for value, count in middles),
                sum_squares=sum(value * value * count for value, count in middles),
                bucket_limit=histogram.edges[1:],
                bucket=histogram.counts,
            )
        )
    return event
