"""Exchange between schedules of engines that follow virtual time, over the board."""

from __future__ import annotations

import time

from rlhpc.parallel.board import Board
from rlhpc.rollout.generator.messages import news_key
from rlhpc.rollout.schedule.actions import Action, Admit, EngineStep
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule

_NEWS_SECONDS, _LONGEST_NEWS_SECONDS = 0.002, 0.1  # between two news, by engine: the store takes a few hundred a second


class NewsExchange:
    """One engine's news and those of the others."""

    def __init__(self, board: Board, engine: int, engines: int) -> None:
        self._board, self._engine, self._engines = board, engine, engines
        self._posted = float("-inf")

    def post(self, schedule: EngineSchedule, action: Action | None = None) -> None:
        """Posts what other engines may wait for, before anything that takes long; between steps only now and then."""
        seconds = min(_NEWS_SECONDS * self._engines, _LONGEST_NEWS_SECONDS)
        between_steps = isinstance(action, EngineStep | Admit) and time.monotonic() < self._posted + seconds
        if self._engines > 1 and schedule.has_news and not between_steps:
            self._board.post(news_key(self._engine), schedule.news())
            self._posted = time.monotonic()

    def learn(self, schedule: EngineSchedule) -> None:
        """Lets the schedule learn what the others have posted."""
        others = [engine for engine in range(self._engines) if engine != self._engine]
        news = self._board.read(map(news_key, others))
        for engine in others:
            if news_key(engine) in news:
                schedule.learn(engine, news[news_key(engine)])
