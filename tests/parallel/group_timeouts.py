"""Timeouts of a rank's process groups, also at the end of a whole run."""

from __future__ import annotations

import json

from rlhpc.core.context import RankContext


def seconds_by_group() -> dict[str, float]:
    """Timeout of each process group of this rank by the group's description and name."""
    import torch
    import torch.distributed as dist

    found: dict[str, float] = {}
    for group in dist.distributed_c10d._world.pg_map:
        description = group.group_desc
        name = group.group_name if description in ("", "undefined") else description
        back_end = group._get_backend(torch.device("cpu"))
        assert found.get(name) in (None, back_end.options._timeout.total_seconds()), name
        found[name] = back_end.options._timeout.total_seconds()
    return found


def run(context: RankContext) -> str | None:
    """A rank of a run that leaves its timeouts in the run folder before it leaves its groups."""
    from rlhpc.parallel import groups
    from rlhpc.trainer.main import run_rank

    leave = groups.leave

    def record() -> None:
        text = json.dumps(seconds_by_group())
        (context.run.path / f"timeouts-{context.info.job_rank}.json").write_text(text)
        leave()

    groups.leave = record
    return run_rank(context)
