"""What a run records about itself."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config.alerts import AlertsSection
from rlhpc.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from rlhpc.config.trackers import TrackerEntry

TENSORBOARD = "tensorboard"  # the name of this tracker


class TrainingSamplesSection(Section):
    """Samples of training steps, as Parquet files in the run folder."""

    every: NonNegativeInt = 10
    """Interval in RL steps at which a step's samples are kept, after the first step's; 0: never."""
    max_mib: PositiveInt = 256
    """Maximum size of these files together, in MiB: the oldest but the first are removed."""


class ObserveSection(Section):
    tensorboard: bool = True
    """Metrics for TensorBoard as well."""
    trackers: list[TrackerEntry] = []
    """Further trackers: MLflow, Weights & Biases, your own."""
    samples: NonNegativeInt = 8
    """Number of samples per validation written to samples.jsonl and shown at the end."""
    histogram_steps: NonNegativeInt = 1000
    """Maximum number of RL steps with histograms in histograms.jsonl, evenly spread over the run; 0: no histograms."""
    prometheus: bool | Path = False
    """Prometheus text file of the newest step: metrics.prom in the run folder (true), a file with the suffix .prom, or
    a folder for rlhpc-<run>.prom."""
    training_samples: TrainingSamplesSection | None = TrainingSamplesSection()
    """Samples of training steps, written to training_samples in the run folder; null: none."""
    straggler_minutes: NonNegativeFloat = 2.0
    """Minutes, and at least 5 steps, in which a rank must be slower than the others to be named as straggler."""
    alerts: AlertsSection = AlertsSection()

    def tracker_names(self) -> list[str]:
        """Names of all trackers, TensorBoard's first."""
        return [*([TENSORBOARD] if self.tensorboard else []), *(tracker.name for tracker in self.trackers)]
