"""The program of a rank of judges. Part of the composition root."""

from __future__ import annotations

from rlhpc.algo import find_algorithm
from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext, Reason
from rlhpc.core.errors import UserError
from rlhpc.parallel.agreement import UNKNOWN, check_job_agreement
from rlhpc.sharding.placement import placement_of
from rlhpc.trainer.architecture import check_architecture
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.connect import judge_channel
from rlhpc.trainer.judge_loop import JudgeLoop, JudgeParts
from rlhpc.trainer.models import make_judge_models
from rlhpc.trainer.update import Updater


def run_judge(config: RunConfig, context: RankContext) -> Reason | None:
    """The program of a rank of judges; the ranks have joined. Returns why the trainers stop early."""
    info, placement = context.info, placement_of(config, context.info.job_size)
    shape = resolve_model(config)
    check_architecture(config)
    algorithm = find_algorithm(config.algorithm)
    if config.critic.on == "judges" and not algorithm.needs_critic:
        raise UserError(f"judges, but {config.algorithm.name} has no critic", where="critic.on", remedy="leave it out")
    models = make_judge_models(config, info, shape)
    channel = judge_channel(info, placement) if info.rank == 0 else None
    beginning = placement_of(config, info.job_size).beginning_ranks
    check_job_agreement(info, {"training prompts of digest": UNKNOWN}, beginning)
    batching = Batching.of(config)
    parts = JudgeParts(config, context, models, batching, Updater(config, context, models, batching, algorithm))
    reason = JudgeLoop(parts, channel).run()
    if channel is not None:
        channel.close()
    assert models.backends is not None
    models.backends.close()
    return reason
