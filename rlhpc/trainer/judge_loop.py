"""Loop of the ranks of judges: they score, evaluate and train as the trainers ask, in order."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhpc.api import BackgroundWrite, Sample
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext, Reason
from rlhpc.core.files import make_folder
from rlhpc.core.heartbeat import enter, touch
from rlhpc.parallel.agreement import on_first_rank, together
from rlhpc.parallel.channel import ObjectChannel
from rlhpc.parallel.transfer import gather_objects
from rlhpc.trainer.advantages import StepAdvantages, values_beside
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.evaluate import check_finite_weights
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
from rlhpc.trainer.reward_model import scores_of
from rlhpc.trainer.roles import JudgeModels, Role
from rlhpc.trainer.update import Updater

_LOOK_SECONDS, _LOOK_AT_WRITES_SECONDS = 5.0, 0.5  # between two looks of all ranks for messages
_WAITING = "waiting for the trainers"


@dataclass
class JudgeParts:
    """Parts that a rank of judges works with."""

    config: RunConfig
    context: RankContext
    models: JudgeModels
    batching: Batching
    updater: Updater


@dataclass(frozen=True)
class _Write:
    """A checkpoint that is written in the background."""

    step: int
    shares: Sequence[BackgroundWrite]


class JudgeLoop:
    """A rank of judges. Collective over them, of which only the first has a ``channel`` to those that train."""

    def __init__(self, parts: JudgeParts, channel: ObjectChannel | None) -> None:
        self._parts, self._models, self._channel = parts, parts.models, channel
        self._arrived: deque[Any] = deque()
        self._samples: Sequence[Sample] = ()  # of the present step
        self._write: _Write | None = None
        self._answered, self._idle = time.perf_counter(), 0.0

    def run(self) -> Reason | None:
        """Answers until the run ends; returns why it stops early."""
        while True:
            message = self._wait_for_message()
            if isinstance(message, EndJudging):
                self._settle(wait=True)
                return message.reason
            self._do(message)

    def _do(self, message: Any) -> None:
        match message:
            case BeginJudging(checkpoint, reference):
                if checkpoint is not None:
                    self._load(checkpoint, reference=reference)
            case TakeActorWeights(model):
                self._take_weights(model)
            case ScoreConversations(conversations):
                touch("reward model")
                assert self._models.reward is not None, "conversations are for a reward model"
                scores = scores_of(self._models.reward, conversations)
                self._models.reward.model.offload()
                self._answer(ConversationScores(scores))
            case EvaluateSamples(step, samples):
                touch("log_probs", step)
                self._samples = samples
                temperature = self._parts.config.rollout.temperature
                self._answer(SampleValues(values_beside(self._models, self._parts.batching, samples, temperature)))
            case TrainCritic():
                self._train(message)
            case SaveJudged():
                self._save(message)
            case _:
                raise AssertionError(f"unknown message {type(message).__name__}")

    def _load(self, folder: Path, *, reference: bool) -> None:
        enter("loading the checkpoint")
        if self._models.critic is not None:
            self._models.critic.model.load(folder / "critic")
            self._models.critic.model.offload()
        if self._models.reference is not None and reference:
            self._models.reference.model.load(folder / "reference")
            self._models.reference.model.offload()

    def _take_weights(self, name: str) -> None:
        """Takes the actor's weights, which come tensor by tensor."""
        role = self._named()[name]

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            while (message := self._wait_for_message()) is not None:
                assert isinstance(message, ActorTensor), f"{type(message).__name__} instead of weights"
                touch("taking the actor's weights")
                yield message.name, message.tensor

        role.model.take_tensors(tensors())
        role.model.offload()

    def _train(self, message: TrainCritic) -> None:
        state, samples = message.state, self._samples if message.samples is None else message.samples
        touch("update", state.step + 1)
        estimate = StepAdvantages([], message.returns)
        metrics = self._parts.updater.update_critic(state, samples, {"old_values": message.old_values}, estimate)
        norms = state.grad_norms.get("critic")
        self._answer(CriticTrained(metrics, state.critic_steps, state.critic_skipped, norms))

    def _save(self, message: SaveJudged) -> None:
        """Begins to write the models; the answer follows when all is written."""
        self._settle(wait=True)
        step, models = message.state.total_steps, self._named()
        touch("save", step)
        if not message.reference:
            models.pop("reference", None)
        critic = {name: role.model for name, role in self._models.trained.items()}
        check_finite_weights(critic, message.state)
        shares: list[BackgroundWrite] = []
        try:
            for name, role in models.items():
                folder = message.folder / name
                on_first_rank(functools.partial(make_folder, folder))
                save = functools.partial(role.model.save, folder, step, asynchronous=message.asynchronous)
                shares += [share for share in [together(save)] if share is not None]
                role.model.offload()
        except OSError as error:
            self._answer(JudgedSaved(step, error))
            return
        self._write = _Write(step, shares)
        self._settle(wait=not shares)

    def _named(self) -> dict[str, Role]:
        """The models that a checkpoint may have, by name."""
        found = {"critic": self._models.critic, "reference": self._models.reference}
        return {name: role for name, role in found.items() if role is not None}

    def _settle(self, *, wait: bool) -> None:
        """Answers for a checkpoint that is written; with ``wait`` waits for it."""
        write = self._write
        if write is None:
            return
        if not wait and not all(gather_objects(all(share.done() for share in write.shares))):
            return
        self._write, problem = None, None
        try:
            together(functools.partial(_finish, write.shares))
        except OSError as error:
            problem = error
        self._answer(JudgedSaved(write.step, problem))

    def _answer(self, content: ConversationScores | SampleValues | CriticTrained | JudgedSaved) -> None:
        now = time.perf_counter()
        idle, self._idle = self._idle, 0.0
        busy, self._answered = max(0.0, now - self._answered - idle), now
        if self._channel is not None:
            self._channel.send(JudgeAnswer(content, idle, busy))

    def _wait_for_message(self) -> Any:
        """The next message, on all ranks."""
        while not self._arrived:
            began = time.perf_counter()
            found = self._look() if self._channel is not None else None
            self._idle += time.perf_counter() - began
            self._arrived.extend(gather_objects(found)[0] or ())
            if not self._arrived:
                self._settle(wait=False)
        return self._arrived.popleft()

    def _look(self) -> list[Any]:
        """Messages that have arrived, on the first rank; waits for a moment."""
        assert self._channel is not None
        inbox = self._channel.inbox
        inbox.wait(_LOOK_SECONDS if self._write is None else _LOOK_AT_WRITES_SECONDS, _WAITING)
        return [message for _, message in inbox.take()]


def _finish(shares: Sequence[BackgroundWrite]) -> None:
    for share in shares:
        share.finish()
