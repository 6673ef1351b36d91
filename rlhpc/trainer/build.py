"""The composition root of ranks that train: the only place, with ``models.py``, ``parts.py`` and ``connect.py``, that
names the concrete back end, engine and reward workers."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlhpc.algo import find_algorithm
from rlhpc.api import RolloutEngine
from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.model_settings import critic_settings, models_on
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.data.prompts import PromptSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.parallel.compat import device
from rlhpc.parallel.groups import engine_group
from rlhpc.reshard.manager import Job, ReshardManager
from rlhpc.rollout.generator.parts import EnginePlace
from rlhpc.rollout.requests import sampling_of
from rlhpc.rollout.tool_kinds import tool_schemas
from rlhpc.rollout.tool_parsers import find_parser
from rlhpc.sharding.layout import make_layout
from rlhpc.sharding.placement import Placement, placement_of
from rlhpc.trainer.architecture import check_architecture, check_engine
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.choosing import Chooser
from rlhpc.trainer.colocated import Colocated
from rlhpc.trainer.connect import connect_engines, connect_judges, lender_channel, lenders_of, rank_sides
from rlhpc.trainer.evaluate import Evaluator
from rlhpc.trainer.ground_truths import check_ground_truths
from rlhpc.trainer.lending import Lender, Lending
from rlhpc.trainer.models import make_models
from rlhpc.trainer.parts import Data, engine_parts, load_data, make_engine
from rlhpc.trainer.reward_model import RewardModel
from rlhpc.trainer.reward_reader import RewardReader
from rlhpc.trainer.roles import EngineRank, Models
from rlhpc.trainer.rollout import Rollout
from rlhpc.trainer.run import Run
from rlhpc.trainer.sampling import Sampler
from rlhpc.trainer.separate import Separate
from rlhpc.trainer.training_samples import SampleTexts
from rlhpc.trainer.update import Updater


def build(config: RunConfig, context: RankContext) -> Run:
    """Builds models, data and engine on this rank; the ranks have joined. Collective."""
    info = context.info
    shape = resolve_model(config)
    check_architecture(config)
    check_engine(config)
    tokenizer = Tokenizer.load(config.model.path, shape.vocab_size, config.data)
    algorithm = find_algorithm(config.algorithm)
    rl = config.train.steps > 0
    generates = rl or bool(config.data.validation)
    placement = placement_of(config, info.job_size)
    place = EngineRank(info.rank, info.world_size, config.rollout.tp)
    # Rewards, tools and data first: errors in them show before the models take their time to load. Then the engine,
    # which needs its whole share of the GPU free, and sleeps while the models and their optimizer states are built.
    parts = engine_parts(config, tokenizer, place) if generates and not placement.separate else None
    scores = generates and config.reward_model_on != "engines"  # judges read conversations that trainers make
    reader = RewardReader.of(config, tokenizer) if scores else None
    data = load_data(config, info, tokenizer, shape, texts=reader is not None and reader.own is not None)
    if parts is not None:
        check_ground_truths(config, place, parts.reward_workers, data.prompts, data.validation)
    lends = lenders_of(config, placement) > 0
    engine = make_engine(config, shape, tokenizer) if parts is not None or lends else None
    models = make_models(config, info, shape, algorithm if rl else None)
    if engine is not None:
        engine.check_memory()
    judges = models.judges = connect_judges(config, info, placement)
    assert models.backends is not None
    end = models.backends.close
    batching, carryover = Batching.of(config), Carryover.of(config.train)
    run = Run(
        config=config,
        context=context,
        models=models,
        algorithm=algorithm,
        batching=batching,
        updater=Updater(config, context, models, batching, algorithm),
        carryover=carryover,
        judges=judges,
        sft=data.sft,
        closers=(end,) if judges is None else (judges.close, end),
    )
    scorer = None
    judged = judges is not None and "reward model" in judges.models
    if (scoring := judges if judged else models.reward) is not None:
        assert reader is not None
        scorer = RewardModel(scoring, reader, tokenizer)
    if parts is not None and engine is not None:
        rollout = Rollout(engine, place, config.rollout, config.seed, parts.reward_workers, parts.tools)
        _add_rollouts(run, tokenizer, rollout, data, scorer)
        run.closers = (parts.close, engine.shutdown, *run.closers)
    elif placement.separate:
        separate = _add_engines(run, tokenizer, placement, data, scorer)
        if engine is not None:
            _add_lender(run, separate, engine, placement)
    return run


def _add_rollouts(run: Run, tokenizer: Tokenizer, rollout: Rollout, data: Data, scorer: RewardModel | None) -> None:
    """Adds what generates with the engine of this rank."""
    weights = _manager(run.config, run.models, rollout.engine)
    if data.prompts is not None:
        run.rl = Colocated(weights, Sampler(rollout, _chooser(run, data.prompts, scorer)))
        run.texts = _texts(run, tokenizer, data.prompts)
    if data.validation is not None:
        run.evaluator = Evaluator(run.config, run.context, data.validation, tokenizer, rollout, weights, scorer)


def _add_engines(
    run: Run, tokenizer: Tokenizer, placement: Placement, data: Data, scorer: RewardModel | None
) -> Separate:
    """Adds engines on ranks of their own."""
    assert data.prompts is not None, "a separate placement has RL steps"
    run.engines = connect_engines(run.config, run.context, placement, run.models)
    separate = Separate(replace(_chooser(run, data.prompts, scorer), leaves=False), run.engines)
    run.rl, run.engines.expected_lengths = separate, separate.expected_lengths
    run.texts = _texts(run, tokenizer, data.prompts)
    if data.validation is not None:
        run.evaluator = Evaluator(run.config, run.context, data.validation, tokenizer, None, None, scorer)
    run.closers = (run.engines.close, *run.closers)
    return separate


def _add_lender(run: Run, separate: Separate, engine: RolloutEngine, placement: Placement) -> None:
    """Adds the engine of this rank, which continues requests of the others."""
    info, section = run.context.info, run.config.rollout
    place = EngineRank(info.rank, info.world_size, section.tp)
    group = engine_group(place.world_size, place.rank, place.tp)
    channel = lender_channel(info, place.index, placement) if place.leads else None
    lender = Lender(engine, EnginePlace(place.index, place.engines, place.leads, group), channel)
    sampling = sampling_of(section, section.temperature)
    run.rl = Lending(separate, _manager(run.config, run.models, engine), lender, sampling)
    run.closers = (*([channel.close] if channel is not None else []), engine.shutdown, *run.closers)


def _chooser(run: Run, prompts: PromptSet, scorer: RewardModel | None) -> Chooser:
    least, greedy = _least_samples(run), run.algorithm.needs_greedy
    return Chooser(run.config, prompts, run.carryover, scorer, least, greedy)


def _texts(run: Run, tokenizer: Tokenizer, prompts: PromptSet) -> SampleTexts:
    rollout = run.config.rollout
    parse = find_parser(rollout.tool_parser, tokenizer, tool_schemas(rollout.tools)) if rollout.tools else None
    return SampleTexts(tokenizer, prompts.numbered, parse)


def _least_samples(run: Run) -> int:
    """Fewer samples cannot feed every data-parallel rank in every minibatch."""
    config, widest = run.config, max(role.layout.dp for role in run.models.trained.values())
    judges = placement_of(config, run.context.info.job_size).judges
    if judges is not None and "critic" in models_on(config, "judges"):
        widest = max(widest, make_layout(critic_settings(config).parallel, judges.size).dp)
    return config.train.minibatches * widest


def _manager(config: RunConfig, models: Models, engine: RolloutEngine) -> ReshardManager:
    actor = models.actor.model
    job = Job(config.resources.ranks_per_node, getattr(torch, config.model.dtype), device())
    return ReshardManager(actor, engine, rank_sides(config, actor, engine), config.reshard, job)
