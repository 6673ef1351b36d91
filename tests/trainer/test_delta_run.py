"""A run whose weights go to the engine as deltas is the run whose weights go in full, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import complete, records
from tests.trainer.test_separate import separate, steps_of

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, pytest.mark.long]


def test_a_run_with_deltas_equals_one_without(tmp_path: Path) -> None:
    keys = {"model__dtype": "bfloat16", "steps": 4}
    for delta in ("off", "compressed"):
        output = complete(separate(tmp_path / delta, 1, reshard__delta=delta, **keys))
        assert "wrong checksum" not in output
    assert steps_of(tmp_path / "compressed") == steps_of(tmp_path / "off")
    with_deltas = [record for record in records(tmp_path / "compressed" / "run") if record["phase"] == "rl"]
    first, *later = [
        {name.partition("/")[2]: record[name] for name in record if name.startswith("weight_sync/")}
        for record in with_deltas
        if record["step"]
    ]
    assert len(later) == 3
    assert first["sent_bytes_sum"] >= first["weights_bytes_sum"] > 0
    for each in later:
        assert each["weights_bytes_sum"] == first["weights_bytes_sum"]
        assert 0 < each["sent_bytes_sum"] < 0.6 * each["weights_bytes_sum"]
        assert 0 < each["changed_elements_sum"] < 0.5 * each["weights_bytes_sum"]
        assert each["repaired_messages_sum"] == 0
    assert not any(name.startswith("weight_sync/") for r in records(tmp_path / "off" / "run") for name in r)
