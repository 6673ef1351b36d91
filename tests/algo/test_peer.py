"""Every estimator, loss, KL form, aggregation and correction against verl 0.9.1's own functions.

The golden file holds random ragged cases and what verl computes of them; tests/helpers/peer_verl.py makes it, and
compares any number of cases (docs/measurements/2026-11-algorithms.md).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import peer

_TOLERANCE = 1e-5
_ANEW = "If the cases change on purpose: tests/helpers/peer_verl.py describes how to make the file again."


CASES, VERSIONS = peer.stored()


def test_the_file_says_which_versions_made_it() -> None:
    assert VERSIONS["verl"] == "0.9.1"


@pytest.mark.heavy
@pytest.mark.parametrize("index", range(len(CASES)))
def test_all_results_equal_verls(index: int) -> None:
    case, expected = CASES[index]
    found = peer.ours(case)
    assert found.keys() == expected.keys(), _ANEW
    wrong = []
    for name, value in peer.in_our_convention(case, expected).items():
        difference = np.abs(found[name].astype(np.float64) - value) / np.maximum(1.0, np.abs(value))
        if not (difference < _TOLERANCE).all():
            wrong.append(f"{name}: {difference.max():.1e}\n  here {found[name].tolist()}\n  verl {value.tolist()}")
    if wrong:
        pytest.fail("\n".join([f"case {index}", *wrong, _ANEW]), pytrace=False)


def test_the_cases_reach_every_branch() -> None:
    """Clips, dual clip, masks and bounds of weights bite in some case, and do not in others."""
    cases = [expected for _, expected in CASES]
    for a, b in [
        ("gradient/clipped/token-mean", "gradient/policy_gradient/token-mean"),
        ("gradient/clipped/token-mean", "gradient/dual_clip/token-mean"),
        ("gradient/clipped/token-mean", "gradient/gspo/token-mean"),
        ("gradient/cispo/token-mean", "gradient/policy_gradient/token-mean"),
        ("correction/mask/token", "correction/truncate/token"),
        ("correction/mask/sequence", "correction/truncate/sequence"),
        ("gradient/clipped/token-mean", "gradient/clipped/sequence-mean"),
    ]:
        assert any(not np.allclose(case[a], case[b]) for case in cases), (a, b)
    assert any((case["gradient/clipped/token-mean"] == 0).any() for case in cases)
    alone = [1 in np.unique(given["groups"], return_counts=True)[1] for given, _ in CASES]
    assert 4 < sum(alone) < len(CASES) / 2, "groups of one, and cases without any"
    assert any((given["mask"] == 0).any() for given, _ in CASES)
    assert any((given["mask"] == 1).all() for given, _ in CASES)
