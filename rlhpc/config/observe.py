"""What a run records about itself."""

from __future__ import annotations

from rlhpc.config.section import NonNegativeInt, Section


class ObserveSection(Section):
    tensorboard: bool = True
    """Metrics for TensorBoard as well."""
    samples: NonNegativeInt = 8
    """Number of samples per validation written to samples.jsonl and shown at the end."""
