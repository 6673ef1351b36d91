"""Checks before the start, from the config and the headers of its files, that a run can work."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.checkpoint.formats.model_folder import check_data_file, check_tokenizer, check_weights
from rlhpc.checkpoint.formats.weight_table import refuse_other_backend
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError
from rlhpc.core.files import contains
from rlhpc.core.folder import RunFolder
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.absent import DRAFT_MODEL, REWARD_MODEL, TOKENIZER, WEIGHTS, data_files
from rlhpc.plan.checks.backend import backend_text, check_backend, layout_text
from rlhpc.plan.checks.beside import check_beside
from rlhpc.plan.checks.beside_engines import check_beside_engines, check_shapes_beside_engines
from rlhpc.plan.checks.data import check_data, check_export, check_keep_best
from rlhpc.plan.checks.judges import judge_parallels
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.checks.limits import check_lengths, check_limits, check_rope_tokens
from rlhpc.plan.checks.observe import check_alerts, check_profile, check_trackers
from rlhpc.plan.checks.placement import check_placement, check_roles
from rlhpc.plan.checks.rewards import check_rewards
from rlhpc.plan.checks.rollout import check_rollout
from rlhpc.plan.checks.sampling import off_policy_warnings, vocabulary_faults
from rlhpc.plan.checks.slurm import check_environment_archive, secret_warnings
from rlhpc.plan.checks.speculative import draft_faults
from rlhpc.plan.checks.training import check_algorithm, check_experts, check_memory, check_optimizers, check_sharing
from rlhpc.plan.checks.user_code import check_own_code
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import Backend, backend_for, judge_ranks
from rlhpc.sharding.shards import num_parameters


def layouts_text(config: RunConfig, layout: ParallelLayout, shape: ModelDescription | None) -> str:
    world_size, backend = config.world_size, backend_for(config, shape)
    roles = check_roles(config, world_size)
    texts = [f"training {layout_text(backend, config.actor.parallel, layout.world_size, shape)}"]
    if config.critic.parallel is not None and config.critic.on == "trainers":
        texts.append(f"critic {layout_text(backend, config.critic.parallel, layout.world_size, shape)}")
    texts.append(f"rollout {roles.num_engines} engine(s) of tp {config.rollout.tp}{_with_models(config)}")
    if roles.separate:
        judges = _judge_texts(config, backend) if roles.judges else []
        judged = [f"{roles.judges.size} for {', '.join(judges)}"] if roles.judges else []
        texts = [f"{roles.trainers.size} for {'; '.join(texts[:-1])}", *judged, f"{roles.engines.size} for {texts[-1]}"]
        texts[-1] += f", staleness up to {config.asynchrony.max_staleness}"
    if roles.lends:
        texts[0] += f", which lend {roles.num_lenders} engine(s)"
    return f"{world_size} ranks on {config.slurm.most_nodes} node(s): {'; '.join(texts)}"


def _judge_texts(config: RunConfig, backend: Backend) -> list[str]:
    ranks = judge_ranks(config)
    return [f"{name} {layout_text(backend, found, ranks, None)}" for name, found in judge_parallels(config).items()]


def _with_models(config: RunConfig) -> str:
    names = ["the reference"] if config.reference_on == "engines" and config.algorithm.kl.coefficient > 0 else []
    names += ["the reward model"] if config.reward_model_on == "engines" else []
    return f" with {' and '.join(names)}" if names else ""


def batch_text(config: RunConfig) -> str:
    train, rollout = config.train, config.rollout
    texts = []
    if config.sft is not None:
        texts.append(f"sft {config.sft.steps} steps of {config.sft.sequences_per_step} sequences")
    if train.steps:
        texts.append(
            f"rl {train.steps} steps of {train.prompts_per_step} prompts x {rollout.samples_per_prompt} samples in "
            f"{train.minibatches} minibatch(es)"
        )
    if config.evaluates_only:
        texts.append(f"{config.validation.samples_per_prompt} response(s) to each validation prompt")
    return "; ".join(texts)


def model_text(shape: ModelDescription) -> str:
    return (
        f"{shape.architecture}, {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{num_parameters(shape) / 1e6:,.1f} M parameters"
    )


Summary = list[tuple[str, str]]
_MOST_SAMPLES = 10**12
_RANKS = "resources.ranks_per_node or slurm.nodes"


def check_config(
    config: RunConfig,
    *,
    prepared: bool = True,
    starting: bool = True,
    workdir: Path | None = None,
    absent: Collection[str] = (),
) -> Summary:
    """Returns (topic, text) rows that describe the run. Raises UserError with all that cannot work.

    ``prepared`` false: ``config.prepare`` has yet to run, and input files may be absent. ``starting`` false: a disk
    that is too small is a warning, because the run may start on another machine. ``workdir``: also look there for the
    functions that the config names. ``absent``: keys of inputs that are not on this machine (rlhpc.plan.checks.absent),
    which are not checked.
    """
    faults = Faults()
    with faults.collect():
        check_node_range(config)
    with faults.collect():
        check_run_folder(config)
    with faults.collect():
        check_own_checkpoints(config)
    shape = None
    if prepared or config.model.path.exists():
        with faults.collect():
            shape = resolve_model(config)
    layout = _check_sizes(config, shape, faults)
    with faults.collect():
        check_backend(config, shape)
    _check_sections(config, faults)
    if layout is not None:
        _check_models(config, shape, layout, faults, prepared=prepared and REWARD_MODEL not in absent)
    if shape is not None:
        with faults.collect():
            check_experts(config.actor.moe, shape)
        with faults.collect():
            draft = draft_faults(config, shape, weights=prepared and _guessing(config) not in absent)
            Faults((*vocabulary_faults(config, shape), *draft)).raise_all()
    summary: Summary = []
    with faults.collect():
        summary.append(("model", _check_model(config, shape, absent, prepared=prepared)))
    _check_data(config, faults, absent, prepared=prepared)
    warnings = []
    if workdir is not None:
        with faults.collect():
            warnings += check_own_code(config, workdir)
    if shape is not None:
        with faults.collect():
            # Memory is predicted for a layout and settings that can work.
            able = layout if not faults.errors else None
            warnings = [*check_limits(config, shape, able, prepared=prepared, starting=starting), *warnings]
    faults.raise_all()
    assert layout is not None
    summary = [("layout", layouts_text(config, layout, shape)), ("batch", batch_text(config)), *summary]
    if shape is not None:
        summary.insert(1, ("backend", backend_text(config, shape)))
    summary += [("data", text) for text in _data_texts(config)]
    return summary + [("warning", text) for text in (*warnings, *off_policy_warnings(config), *secret_warnings(config))]


def _check_sizes(config: RunConfig, shape: ModelDescription | None, faults: Faults) -> ParallelLayout | None:
    """Collects the faults of placement and layouts; returns the layout on the most nodes, None if it is invalid."""
    with faults.collect():
        check_placement(config)
        for nodes in dict.fromkeys((config.slurm.least_nodes, config.slurm.most_nodes)):
            layout = None
            with faults.collect():
                layout = check_nodes(config, nodes, shape)
        return layout
    return None


def _check_sections(config: RunConfig, faults: Faults) -> None:
    """Collects the faults of keys that only concern each other."""
    keys = (check_algorithm, check_rewards, check_rollout, check_data, check_alerts, check_profile)
    others = (check_keep_best, check_export, check_beside_engines, check_optimizers, check_sharing, check_trackers)
    for check in (*keys, *others, check_environment_archive, check_rope_tokens):
        with faults.collect():
            check(config)


def _check_models(
    config: RunConfig, shape: ModelDescription | None, layout: ParallelLayout, faults: Faults, *, prepared: bool
) -> None:
    """Collects the faults of models under a layout that is valid."""
    check_beside(config, shape, layout, faults, rewards=prepared)
    if prepared:
        with faults.collect():
            check_shapes_beside_engines(config, shape)
    if shape is not None:
        with faults.collect():
            check_memory(config.actor.memory, shape, layout, backend_for(config, shape))


def outline(config: RunConfig) -> Summary:
    """Returns (topic, text) rows of layout, batches and model, from the config and the model's config.json alone.

    Raises UserError where nothing can be predicted. Weights and prompts may be absent.
    """
    faults, layout = Faults(), None
    with faults.collect():
        check_node_range(config)
    with faults.collect():
        shape = resolve_model(config)
        layout = check_plannable(config, shape)
    faults.raise_all()
    assert layout is not None
    batch = [("batch", text)] if (text := batch_text(config)) else []
    backend = ("backend", backend_text(config, shape))
    model = ("model", f"{config.model.path}: {model_text(shape)}")
    return [("layout", layouts_text(config, layout, shape)), backend, *batch, model]


def check_node_range(config: RunConfig) -> None:
    """Refuses a minimum number of nodes above the maximum."""
    if config.slurm.least_nodes > config.slurm.most_nodes:
        wrong = f"{config.slurm.nodes}: invalid range: minimum exceeds maximum"
        raise UserError(wrong, where="slurm.nodes", remedy="write [minimum, maximum]")


def check_run_folder(config: RunConfig) -> None:
    """Refuses a run folder in the place of a file, or inside one."""
    folder = config.folder.absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir():
        raise UserError(f"{str(above)!r} is not a folder", where="run_dir", remedy="choose another one")


def check_own_checkpoints(config: RunConfig) -> None:
    """Refuses models in the run's own checkpoints, of which the run removes all but the newest."""
    if config.evaluates_only:
        return
    models = {
        "model.path": config.model.path,
        "model.weights": config.model.weights,
        "critic.path": config.critic.path,
        **_draft_folder(config),
        **_reward_folder(config),
    }
    checkpoints = RunFolder(config.folder).checkpoints
    Faults(
        UserError(
            f"{str(path)!r} is among this run's checkpoints; only the newest {config.checkpoint.keep} are kept",
            where=key,
            remedy="copy it to a folder outside, or give the run another run_dir",
        )
        for key, path in models.items()
        if path is not None and contains(checkpoints, path)
    ).raise_all()


def check_plannable(config: RunConfig, shape: ModelDescription) -> ParallelLayout:
    """Returns the layout on the most nodes. Raises UserError if it, batches, lengths, recomputation or other models do
    not fit."""
    faults, layout = Faults(), None
    with faults.collect():
        check_placement(config)
        layout = check_layout(config, config.slurm.most_nodes, shape)
        check_backend(config, shape)
        if config.train.steps:
            _check_samples(config, layout)
    if layout is not None:
        check_beside(config, shape, layout, faults, rewards=False)
        with faults.collect():
            check_memory(config.actor.memory, shape, layout, backend_for(config, shape))
    with faults.collect():
        list(check_lengths(config, shape))
    for check in (check_beside_engines, check_shape_files, check_planned_lengths, check_rope_tokens):
        with faults.collect():
            check(config)
    faults.raise_all()
    check_shapes_beside_engines(config, shape)
    assert layout is not None
    return layout


def check_shape_files(config: RunConfig) -> None:
    """Refuses a critic, reward model or model that guesses without config.json."""
    folders: dict[str, Path | None] = {**_draft_folder(config), **_reward_folder(config)}
    if config.algorithm.name in WITH_CRITIC:
        folders["critic.path"] = config.critic.path
    Faults(
        UserError(f"no config.json in {str(folder)!r}", where=key, remedy="correct the path")
        for key, folder in folders.items()
        if folder is not None and not (folder / "config.json").is_file()
    ).raise_all()


def _guessing(config: RunConfig) -> str:
    """Returns what ``absent`` calls the weights that guess."""
    section = config.rollout.speculative
    return WEIGHTS if section is not None and section.method == "mtp" else DRAFT_MODEL


def _draft_folder(config: RunConfig) -> dict[str, Path | None]:
    """Returns the folder of the model that guesses tokens by its key."""
    section = config.rollout.speculative
    return {} if section is None else {"rollout.speculative.model": section.model}


def _reward_folder(config: RunConfig) -> dict[str, Path]:
    """Returns the reward model's folder by its key."""
    section = config.reward_model
    return {} if section is None else {f"{config.reward_model_key}.model": section.model}


def check_planned_lengths(config: RunConfig) -> None:
    """Refuses mean lengths above their bounds."""
    planned = config.planning
    bounds = (
        ("prompt_tokens", planned.prompt_tokens, "data.max_prompt_tokens", config.data.max_prompt_tokens),
        ("response_tokens", planned.response_tokens, "rollout.max_response_tokens", config.rollout.max_response_tokens),
    )
    Faults(
        UserError(
            f"a mean of {mean} is above {key} {most}", where=f"planning.{name}", remedy=f"lower it, or raise {key}"
        )
        for name, mean, key, most in bounds
        if mean is not None and mean > most
    ).raise_all()


def check_nodes(config: RunConfig, nodes: int, shape: ModelDescription | None = None) -> ParallelLayout:
    """Returns the layout on ``nodes`` nodes. Raises UserError if it, the model (if known) or batches do not fit."""
    try:
        layout = check_layout(config, nodes, shape)
        _check_batches(config, layout)
    except UserError as error:
        if config.slurm.least_nodes == config.slurm.most_nodes:
            raise
        raise UserError(f"on {nodes} nodes: {error.message}", where=error.where, remedy=error.remedy) from None
    return layout


def largest_usable(config: RunConfig, nodes: int) -> int:
    """Returns how many of ``nodes`` slurm.nodes, layout and batches can use; 0 if none."""
    for count in range(min(nodes, config.slurm.most_nodes), config.slurm.least_nodes - 1, -1):
        with suppress(UserError):
            check_nodes(config, count)
            return count
    return 0


def _check_batches(config: RunConfig, layout: ParallelLayout) -> None:
    train, sft = config.train, config.sft
    if config.evaluates_only and not config.data.validation:
        raise UserError("0 steps and no sft section: nothing to do", where="train.steps", remedy="set it to 1 or more")
    if sft is not None and sft.sequences_per_step < layout.dp:
        raise UserError(
            f"{sft.sequences_per_step} sequences cannot feed {layout.dp} data-parallel ranks",
            where="sft.sequences_per_step",
            remedy=f"use at least {layout.dp}, or lower {_RANKS}",
        )
    if not train.steps:
        return
    if not config.data.train:
        raise UserError("no prompt files", where="data.train", remedy="name at least one .parquet or .jsonl file")
    _check_samples(config, layout)


def _check_samples(config: RunConfig, layout: ParallelLayout) -> None:
    train = config.train
    samples = train.prompts_per_step * config.rollout.samples_per_prompt
    if samples > _MOST_SAMPLES:
        raise UserError(
            f"{samples:,} samples a step (train.prompts_per_step x rollout.samples_per_prompt)",
            where="train.prompts_per_step",
            remedy=f"use at most {_MOST_SAMPLES:,} in all",
        )
    valid = [count for count in divisors(samples) if samples // count >= layout.dp]
    if not valid:
        raise UserError(
            f"{samples} samples a step (train.prompts_per_step x rollout.samples_per_prompt) cannot feed "
            f"{layout.dp} data-parallel ranks",
            where="train.prompts_per_step",
            remedy=f"use at least {-(-layout.dp // config.rollout.samples_per_prompt)}, or lower {_RANKS}",
        )
    if train.minibatches not in valid:
        wrong = (
            f"{samples} samples a step do not divide into {train.minibatches} minibatches"
            if samples % train.minibatches
            else f"minibatches of {samples // train.minibatches} samples cannot feed {layout.dp} data-parallel ranks"
        )
        raise UserError(
            wrong,
            where="train.minibatches",
            remedy=f"use {_nearest(train.minibatches, valid)}, or another train.prompts_per_step, "
            f"rollout.samples_per_prompt, {_RANKS}",
        )


def _check_model(config: RunConfig, shape: ModelDescription | None, absent: Collection[str], *, prepared: bool) -> str:
    """Describes the model. Refuses files that are incomplete or do not belong together."""
    folder = config.model.path
    if shape is None:
        return f"{folder}: " + ("cannot be read" if prepared else "not there yet, prepare makes it")
    refuse_other_backend(config.model.weights or folder, backend_for(config, shape))
    weights = None if WEIGHTS in absent else check_weights(config.model.weights or folder, shape)
    template = config.data.chat_template
    tokens = 0 if TOKENIZER in absent else check_tokenizer(folder, shape.vocab_size, chat_template=template)
    if weights is None:
        return f"{folder}: {model_text(shape)}, vocabulary {tokens or '?'} of {shape.vocab_size}; no weights here"
    return (
        f"{folder}: {model_text(shape)} in {len(set(weights.files.values()))} file(s) of "
        f"{weights.total_bytes / 2**20:,.1f} MiB, vocabulary {tokens or '?'} of {shape.vocab_size}"
    )


def _check_data(config: RunConfig, faults: Faults, absent: Collection[str], *, prepared: bool) -> None:
    """Collects the faults of data files."""
    for key, paths in data_files(config).items():
        for index, path in enumerate(paths):
            if path.exists() or (prepared and f"{key}.{index}" not in absent):
                with faults.collect():
                    check_data_file(path, f"{key}.{index}")


def _data_texts(config: RunConfig) -> Iterator[str]:
    """Describes the data files."""
    for key, paths in data_files(config).items():
        absent = not all(path.exists() for path in paths)
        if paths:
            yield f"{key}: {', '.join(map(str, paths))}" + (" (not there yet, prepare makes it)" if absent else "")


def _nearest(number: int, valid: list[int]) -> str:
    """Returns the nearest valid numbers below and above."""
    near = [*[v for v in valid if v < number][-1:], *[v for v in valid if v > number][:1]]
    return " or ".join(map(str, near))
