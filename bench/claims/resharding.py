"""Direct weight sync over gathering whole tensors: memory and traffic; ``bench.reshard`` has more layouts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.claims.common import done
from bench.reshard import MIB, RANKS, make_model, measure

AXES, TP, LAYERS = {"tp": 2, "pp": 2}, 4, 6


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        size = make_model(Path(name), LAYERS) / MIB
        costs = measure(Path(name), AXES, TP, 3)
    direct, gather = costs["direct"], costs["gather"]
    done(
        "resharding over gathering: memory, communication",
        "30% less, 40% less",
        f"**{1 - direct.memory / gather.memory:.0%} less, {1 - direct.traffic / gather.traffic:.0%} less**;"
        f" {gather.seconds / direct.seconds:.1f} times as fast",
        f"{size:,.0f} MiB, trainer tp 2 pp 2 to an engine of tp {TP} on {RANKS} ranks",
    )


if __name__ == "__main__":
    main()
