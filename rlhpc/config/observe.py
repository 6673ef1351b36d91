"""What a run records about itself."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config.section import NonNegativeInt, Section


class ObserveSection(Section):
    tensorboard: bool = True
    """Metrics for TensorBoard as well."""
    samples: NonNegativeInt = 8
    """Number of samples per validation written to samples.jsonl and shown at the end."""
    histogram_steps: NonNegativeInt = 1000
    """Maximum number of RL steps with histograms in histograms.jsonl, evenly spread over the run; 0: no histograms."""
    prometheus: bool | Path = False
    """Prometheus text file with the metrics of the newest step: metrics.prom in the run folder (true), a file with the
    suffix .prom, or a folder for rlhpc-<run>.prom, on the node of rank 0."""
