"""Options of sampling are for data sources that prompts have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError


def test_a_source_that_no_prompt_has_is_refused_with_the_nearest() -> None:
    from rlhpc.trainer.parts import check_sources

    sets = [SimpleNamespace(prompts=SimpleNamespace(rows=[SimpleNamespace(data_source="maths")]))]
    for source in ("maths", "math"):
        rollout = {"sampling_by_source": {source: {"top_k": 5}}}
        config = RunConfig(**{"name": "x", "model": {"path": "m"}, "train": {"steps": 1}, "rollout": rollout})
        if source == "maths":
            check_sources(config, sets)  # type: ignore[arg-type]
            continue
        with pytest.raises(UserError, match=r"sampling_by_source.math: no prompt has .*; did you mean 'maths'"):
            check_sources(config, sets)  # type: ignore[arg-type]
