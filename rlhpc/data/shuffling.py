"""The order in which a step trains on its samples."""

from __future__ import annotations

import random
from collections.abc import Sequence


def shuffled(groups: Sequence[int], seed: int, step: int, epoch: int) -> list[int]:
    """Places of samples, whose groups are given, in random order: groups stay together, so that a minibatch has whole
    ones where their number divides, and the samples of each are shuffled too. Determined by the arguments."""
    generator = random.Random(f"shuffle:{seed}:{step}:{epoch}")
    places: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    members = list(places.values())
    generator.shuffle(members)
    for group_places in members:
        generator.shuffle(group_places)
    return [place for group_places in members for place in group_places]
