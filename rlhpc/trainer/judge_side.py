"""Judges as the ranks that train see them: a step's samples go there; scores, log-probs, values and the critic's
metrics come back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rlhpc.api import RunState, Sample
from rlhpc.core.context import Reason
from rlhpc.core.heartbeat import enter
from rlhpc.parallel.channel import ObjectChannel
from rlhpc.parallel.transfer import gather_objects
from rlhpc.trainer.judge_messages import (
    ActorTensor,
    BeginJudging,
    ConversationScores,
    CriticTrained,
    EndJudging,
    EvaluateSamples,
    JudgeAnswer,
    JudgedSaved,
    SampleValues,
    SaveJudged,
    ScoreConversations,
    TakeActorWeights,
    TrainCritic,
)
from rlhpc.trainer.roles import PerSample

Metrics = dict[str, float]
T = TypeVar("T", ConversationScores, SampleValues, CriticTrained)
_LOOK_SECONDS = 5.0  # after which the other ranks that train show a sign of life
_PAUSE_SECONDS = 0.05
_MOST_QUEUED = 1 << 30  # bytes of weights that wait to be sent


class JudgeSide:
    """The ranks that train, between them and the judges. Methods are collective over the ranks that train, of which
    only the first has a ``channel``. ``models``: those that judges have."""

    def __init__(self, models: tuple[str, ...], channel: ObjectChannel | None) -> None:
        self.models = models
        self._channel = channel
        self._answers: deque[ConversationScores | SampleValues | CriticTrained] = deque()
        self._saved: dict[int, OSError | None] = {}
        self._samples: Sequence[Sample] = ()  # that judges have
        self._evaluating = self._training = False
        self._step = 0
        self._waited = self._idle = self._busy = 0.0  # since the last metrics

    def begin(self, state: RunState, checkpoint: Path | None, *, reference: bool) -> None:
        """Judges load their models from a checkpoint. ``reference``: the reference model too."""
        self._step = state.step
        self._send(BeginJudging(checkpoint, reference))

    def take_weights(self, model: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A model of the judges takes the actor's weights."""
        self._send(TakeActorWeights(model))
        for name, tensor in tensors:
            if self._channel is not None:
                while self._channel.backlog > _MOST_QUEUED:
                    enter("sending weights")
                    self._channel.inbox.check()
                    time.sleep(_PAUSE_SECONDS)
                self._send(ActorTensor(name, tensor.detach().cpu().clone()))
        self._send(None)

    def scores(self, conversations: Sequence[np.ndarray]) -> list[float]:
        """See ``Judges``."""
        self._send(ScoreConversations(conversations))
        return [*self._wait_for(ConversationScores, "reward model").scores]

    def evaluate(self, samples: Sequence[Sample]) -> None:
        """See ``Judges``."""
        if {"reference", "critic"} & {*self.models}:
            self._samples, self._evaluating = samples, True
            self._send(EvaluateSamples(self._step + 1, _sent(samples)))

    def values(self) -> dict[str, PerSample]:
        """See ``Judges``."""
        if not self._evaluating:
            return {}
        self._evaluating = False
        return {**self._wait_for(SampleValues, "log_probs").values}

    def train_critic(
        self, state: RunState, samples: Sequence[Sample], old_values: PerSample, returns: PerSample
    ) -> None:
        """See ``Judges``."""
        known = self._samples
        same = len(samples) == len(known) and all(a is b for a, b in zip(samples, known, strict=True))
        self._training = True
        self._send(TrainCritic(replace(state), old_values, returns, None if same else _sent(samples)))

    def end_step(self, state: RunState) -> Metrics:
        """Waits for the critic's updates of the step, if there are any, and takes over what they changed in the
        ``state``; their metrics, and how long each side waited for the other."""
        metrics: Metrics = {}
        if self._training:
            self._training = False
            trained = self._wait_for(CriticTrained, "update")
            metrics |= trained.metrics
            state.critic_steps, state.critic_skipped = trained.steps, trained.skipped
            if trained.grad_norms is not None:
                state.grad_norms["critic"] = [*trained.grad_norms]
        self._step, self._samples = state.step + 1, ()
        metrics["trainers/judges_seconds"], total = self._waited, self._idle + self._busy
        metrics["judges/idle_fraction"] = self._idle / total if total else 0.0
        self._waited = self._idle = self._busy = 0.0
        return metrics

    def save(self, folder: Path, state: RunState, *, asynchronous: bool, reference: bool) -> JudgesShare | None:
        """Judges write their part of a checkpoint; None if they have none."""
        if "critic" not in self.models and not reference:
            return None
        self._send(SaveJudged(folder, replace(state), asynchronous, reference))
        return JudgesShare(self, state.total_steps)

    def written(self, step: int) -> bool:
        """True if the judges' part of a checkpoint is written, as far as this rank knows. Not collective."""
        self._read()
        return self._channel is None or step in self._saved

    def finish_writing(self, step: int) -> None:
        """Waits until the judges' part of a checkpoint is written; raises their OSError. Not collective."""
        while not self.written(step):
            assert self._channel is not None
            self._channel.inbox.wait(_LOOK_SECONDS, "end of a save")
        error = self._saved.pop(step, None)
        if error is not None:
            raise error

    def end(self, reason: Reason | None) -> None:
        """Lets the judges end. ``reason``: why the run stops early."""
        self._send(EndJudging(reason))

    def close(self) -> None:
        """Disconnects, after ``end``."""
        if self._channel is not None:
            self._channel.close()

    def _send(self, message: object) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _wait_for(self, kind: type[T], phase: str) -> T:
        """The next answer, of this kind, on all ranks."""
        began = time.perf_counter()
        while True:
            found = self._wait_for_answer(phase) if self._channel is not None else None
            sent = gather_objects(found)[0]
            if sent is not None:
                self._waited += time.perf_counter() - began
                assert isinstance(sent, kind), f"judges answer with {type(sent).__name__} instead of {kind.__name__}"
                return sent

    def _wait_for_answer(self, phase: str) -> ConversationScores | SampleValues | CriticTrained | None:
        """The next answer; None if there is none soon."""
        assert self._channel is not None
        deadline = time.monotonic() + _LOOK_SECONDS
        while True:
            self._read()
            left = deadline - time.monotonic()
            if self._answers or left <= 0:
                return self._answers.popleft() if self._answers else None
            self._channel.inbox.wait(left, phase)

    def _read(self) -> None:
        """Takes all that has arrived."""
        for _, message in self._channel.inbox.take() if self._channel is not None else ():
            self._take(message)

    def _take(self, answer: Any) -> None:
        assert isinstance(answer, JudgeAnswer), f"unknown message {type(answer).__name__}"
        self._idle, self._busy = self._idle + answer.idle, self._busy + answer.busy
        if isinstance(answer.content, JudgedSaved):
            self._saved[answer.content.step] = answer.content.error
        else:
            self._answers.append(answer.content)


@dataclass(frozen=True)
class JudgesShare:
    """The judges' part of a checkpoint."""

    side: JudgeSide
    step: int

    def done(self) -> bool:
        return self.side.written(self.step)

    def finish(self) -> None:
        self.side.finish_writing(self.step)


def _sent(samples: Sequence[Sample]) -> list[Sample]:
    """Tokens that the models of judges read: they route to experts by themselves."""
    return [replace(sample, routed_experts=None) for sample in samples]
