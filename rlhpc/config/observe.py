"""What a run records about itself."""

from __future__ import annotations

from rlhpc.config.section import NonNegativeInt, Section


class ObserveSection(Section):
    tensorboard: bool = True
    """Metrics for TensorBoard as well."""
    samples: NonNegativeInt = 8
    """Number of samples per validation written to samples.jsonl and shown at the end."""
    histogram_steps: NonNegativeInt = 1000
    """Maximum number of RL steps with histograms in histograms.jsonl, evenly spread over the run; 0: no histograms."""
