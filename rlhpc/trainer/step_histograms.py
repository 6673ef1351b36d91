"""Writes the histograms of a run's RL steps. Only the first rank calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from rlhpc.api import Sample
from rlhpc.config.schema import RunConfig
from rlhpc.core.files import LineFile
from rlhpc.core.folder import RunFolder
from rlhpc.core.histograms import Histogram
from rlhpc.core.shown import ShownOnly
from rlhpc.observe.metrics import HistogramWriter, binned
from rlhpc.trainer.roles import PerSample


class RunHistograms:
    """histograms.jsonl of a run. A failure is reported once and ends nothing."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self._config, self._folder, self._guard = config, folder, ShownOnly("histograms")

    @cached_property
    def _writer(self) -> HistogramWriter:
        config = self._config
        return HistogramWriter(LineFile(self._folder.histograms), config.train.steps, config.observe.histogram_steps)

    def step(
        self, step: int, samples: Sequence[Sample], advantages: PerSample, logprob_diffs: Histogram | None
    ) -> None:
        """Writes the histograms of an RL step that has ended, if they are due."""
        with self._guard:
            if self._writer.is_due(step):
                self._writer.write(step, {**step_histograms(samples, advantages), "logprob_diff": logprob_diffs})


def step_histograms(samples: Sequence[Sample], advantages: PerSample) -> dict[str, Histogram | None]:
    """Histograms of a step's samples by name; None for one without values."""
    return {
        "response/length": binned([np.array([sample.sampled_len for sample in samples])]),
        "reward": binned([np.array([sample.reward for sample in samples])]),
        "advantage": binned(_trained(samples, advantages)),
    }


def _trained(samples: Sequence[Sample], values: PerSample) -> list[np.ndarray]:
    """Values of the trained tokens of each sample."""
    return [
        tokens if sample.response_mask is None else tokens[sample.response_mask]
        for sample, tokens in zip(samples, values, strict=True)
    ]
