"""Updates that are skipped: the run goes on, counts them and names the samples at fault; too many in a row end it."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhpc.api import LossSums, RunState
from rlhpc.config.load import dump_config, load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.attempts import saved_step
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.errors import NonFiniteError
from rlhpc.core.exits import read_exits, run_recorded
from rlhpc.core.files import read_json, write_atomic
from rlhpc.core.folder import AttemptFolder, RunFolder, SkippedUpdate
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.data import arithmetic
from rlhpc.data.files import Order
from rlhpc.launch.supervise.diagnosis import diagnose_error
from rlhpc.trainer.evaluate import Evaluator
from rlhpc.trainer.skipped import NEWEST, begin_writing, finish_writing
from tests.helpers.distributed import run_ranks
from tests.helpers.learning import estimates, make_config, make_run, make_samples
from tests.helpers.runs import records, write_config
from tests.helpers.tiny_models import make_model

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

# An input that is 0: gradients through its norm are multiplied by 1 / sqrt(epsilon). Their own norm overflows, though
# they are finite as the loss is.
BAD, EPSILON = "7", 1e-44
STEPS, PER_STEP = 4, 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skipped") / "inputs"
    arithmetic.make(str(folder))
    fields, file = folder / "model" / "config.json", folder / "model" / "model.safetensors"
    write_atomic(fields, json.dumps({**read_json(fields), "rms_norm_eps": EPSILON}))
    tensors = load_file(file)
    embeddings = tensors["model.embed_tokens.weight"]
    embeddings[arithmetic.VOCABULARY.index(BAD)] = 0.0
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_leftovers_go_but_not_what_another_model_writes(tmp_path: Path) -> None:
    """Actor and critic may be trained at once, on ranks of their own."""
    for name in ("0001-critic", "0002-actor", "0002-critic"):
        (tmp_path / f".writing-{name}").mkdir()
    (tmp_path / ".writing-0002-critic" / "batches").touch()
    begin_writing(tmp_path / ".writing-0002-critic")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-0002-actor", ".writing-0002-critic"]
    assert not list((tmp_path / ".writing-0002-critic").iterdir())


def test_a_bad_example_costs_one_update_and_no_bit(inputs: Path, tmp_path: Path) -> None:
    prompts = [f"{row}+1=" for row in (0, 1, 2, 3, 4, 5, 6, 8)]
    order, _ = Order(len(prompts)).take(0, len(prompts), seed=0)
    prompts[order[5]] = f"1+{BAD}="  # the second of the third step
    config = _supervised(inputs, tmp_path, prompts)
    assert _start(config, 2) == [""] * 2
    steps = records(tmp_path / "run")
    bad = 3
    assert [record["skipped_updates"] for record in steps] == [0.0, 0.0, 1.0, 0.0]
    for record in steps:
        numbers = {name: value for name, value in record.items() if isinstance(value, float)}
        assert all(map(math.isfinite, numbers.values())), record
        assert ("loss" in record) == ("grad_norm" in record) == (record["step"] != bad)
    update = SkippedUpdate(tmp_path / "run" / "skipped_updates" / f"sft-{bad:08d}-actor-001")
    log = (tmp_path / "run" / "attempts" / "0001" / "logs" / "0").read_text()
    assert (
        f"sft step {bad}, update 1 of the actor: skipped, its gradient norm is inf, each of its samples is finite, the "
        f"backward pass is not; its batch is {update.path}"
    ) in log

    record = read_json(update.record)
    assert (record["grad_norm"], record["not_finite"], record["prompt_ids"]) == ("inf", [], order[4:6])
    assert math.isfinite(float(record["loss"]))
    before, after = (_state(tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "actor") for step in (bad - 1, bad))
    assert before == after, "weights and optimizer, though the update was repeated"


def _state(checkpoint: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in checkpoint.glob("**/*.distcp")}


def test_too_many_in_a_row_end_the_run_before_it_saves(inputs: Path, tmp_path: Path) -> None:
    """And a resumed run goes on counting."""
    prompts = [f"{row}+{BAD}=" for row in range(STEPS * PER_STEP)]
    config = _supervised(inputs, tmp_path, prompts, "train.max_skipped_updates=2")
    run = RunFolder(tmp_path / "run")
    for attempt in (1, 2):
        (message,) = _start(config, 1)
        assert message.startswith("NonFiniteError: sft step 2: 2 update(s) of the actor in a row were skipped")
        failed = read_exits(run.attempt(attempt).exits)[0]
        diagnosis = diagnose_error(failed)
        assert (diagnosis.cause, diagnosis.message) == ("non_finite", message.removeprefix("NonFiniteError: "))
        assert f"the batches are in {run.skipped_updates}, with the samples at fault" in diagnosis.message
        assert "lower sft.optimizer.learning_rate" in diagnosis.message
        assert saved_step(run) == 1
        assert [record["step"] for record in records(run.path)] == [1]
    assert sorted(path.name for path in run.skipped_updates.iterdir()) == [
        "sft-00000001-actor-001",
        "sft-00000002-actor-001",
    ]


def test_weights_that_an_optimizer_spoils_are_never_saved(inputs: Path, tmp_path: Path) -> None:
    optimizer = "sft.optimizer={function: 'tests.trainer.test_skipped:spoiler', learning_rate: 0.01}"
    config = _supervised(inputs, tmp_path, [f"{row}+1=" for row in range(8)], optimizer)
    (line,) = _start(config, 1)
    assert line.startswith("NonFiniteError: the weights of the actor are not finite after sft step 1 and are neither")
    assert saved_step(RunFolder(tmp_path / "run")) == -1


def test_a_bad_reward_costs_the_updates_that_learn_from_it(tmp_path: Path) -> None:
    """Of a group's rewards, all finite, the mean is not. Two epochs of two minibatches, one of which has the group, on
    two pipeline stages; the critic of PPO, which then learns from nothing that is finite."""
    model = make_model(tmp_path / "model", "qwen2")
    for name in ("grpo", "ppo"):
        (tmp_path / name).mkdir()
    for metrics, state, blocked, message in run_ranks(_learn, 2, model, tmp_path):
        assert metrics["skipped_updates"] == blocked == 2.0
        assert all(map(math.isfinite, metrics.values())), metrics
        assert state.actor_skipped == 0
        assert message.startswith("rl step 1: 3 update(s) of the critic in a row were skipped")
        assert "lower critic.optimizer.learning_rate" in message
    grpo, ppo = tmp_path / "grpo", tmp_path / "ppo"
    names = sorted(path.name for path in (grpo / "skipped_updates").iterdir())
    assert [name[:11] for name in names] == ["rl-00000001"] * 2 + ["rl-00000002"] * 2
    found = _not_finite(grpo, "rl-00000001-actor-001")
    assert {(one["prompt_id"], one["sample"]) for one in found} == {(1, i) for i in BAD_SAMPLES}
    for one in found:
        assert one["loss"] == "nan"
        assert one["not_finite"] == {"advantages": make_samples(0)[one["sample"]].response_len}
    for name in names[2:]:
        assert [(one["sample"], one["loss"], one["not_finite"]) for one in _not_finite(grpo, name)] == [(2, "nan", {})]
    critics = _not_finite(ppo, "rl-00000001-critic-003")
    at_fault = {one["sample"]: set(one["not_finite"]) for one in critics}
    assert at_fault == {4: {"returns"}, 5: {"returns"}, 6: {"returns"}}, "no token of sample 7 was selected"


def test_a_validation_of_weights_that_are_not_finite_is_refused() -> None:
    nothing: Any = None  # is not reached
    evaluator = Evaluator(nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    with pytest.raises(NonFiniteError, match="weights of the actor are not finite after sft step 3 and are neither"):
        evaluator.validate(Spoilt(), RunState(sft_step=3))


class Spoilt:
    """Stands for a back end."""

    def has_finite_weights(self) -> bool:
        return False


def test_the_newest_batches_are_kept(tmp_path: Path) -> None:
    for number in [*range(NEWEST + 2), 3]:  # the last one is of a step that a resumed run took again
        writing = SkippedUpdate(tmp_path / "skipped" / ".writing-0001")
        begin_writing(writing.path)
        (writing.path / "batches").write_text(str(number))
        finish_writing(writing, {"number": number}, writing.path.with_name(f"step-{number}"))
        os.utime(writing.path.with_name(f"step-{number}"), (number, number))
    assert {path.name for path in (tmp_path / "skipped").iterdir()} == {f"step-{i}" for i in range(2, NEWEST + 2)}


def _supervised(inputs: Path, folder: Path, prompts: Sequence[str], *overrides: str) -> RunConfig:
    """A run that only learns these prompts' answer, without an engine."""
    examples = [{"prompt": prompt, "response": "1"} for prompt in prompts]
    (folder / "sft.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    file = write_config(
        folder,
        prepare=None,
        model__path=str(inputs / "model"),
        sft__data=[str(folder / "sft.jsonl")],
        sft__steps=STEPS,
        sft__sequences_per_step=PER_STEP,
        train__steps=0,
        data__train=[],
        data__validation=[],
        checkpoint={"every": 1, "keep": 9},
    )
    return load_config(file, overrides)


def _start(config: RunConfig, ranks: int) -> list[str]:
    """The next attempt of a run, on so many ranks: of each the error that ended it, empty if there was none."""
    folder = RunFolder(config.folder)
    known: dict[str, Any] = {"job_id": "", "restart_count": 0, "nodes": ("here",), "world_size": ranks}
    attempt = attempts.begin(folder, **known, saved_step=saved_step(folder))
    for file in (folder.config, attempt.config):
        write_atomic(file, dump_config(config.model_copy(update={"resources": _resources(config, ranks)})))
    return run_ranks(_rank, ranks, str(attempt.path), join=False)


def _resources(config: RunConfig, ranks: int) -> Any:
    return config.resources.model_copy(update={"ranks_per_node": ranks})


def _not_finite(run: Path, name: str) -> list[dict[str, Any]]:
    return read_json(SkippedUpdate(RunFolder(run).skipped_updates / name).record)["not_finite"]


def _rank(attempt: str) -> str:
    """Run a rank's whole program, leaving its records and its log where the launcher would have them."""
    from rlhpc.trainer.main import run_rank

    context, message = _context(AttemptFolder(Path(attempt))), ""
    try:
        run_recorded(context.attempt.exits, context.info, lambda: run_rank(context))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    sys.stderr.flush()
    shutil.copy(os.readlink("/proc/self/fd/2"), context.attempt.logs / str(context.info.rank))
    return message


def _context(attempt: AttemptFolder) -> Any:
    info = RankInfo.from_environ()
    return RankContext(attempt, info, StopRequest(), Heartbeat(attempt.heartbeats, info.rank))


def spoiler(params: Any) -> Any:
    """An optimizer that makes NaN of a weight at its first step, for any gradient."""

    class Spoiler(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param] = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                    param.data.view(-1)[0] = math.nan

    return Spoiler(params)


BAD_SAMPLES = range(4, 8)  # of the second prompt
GRPO: dict[str, Any] = {"algorithm": {"name": "grpo", "kl": {"coefficient": 0.05}}}
PPO: dict[str, Any] = {"algorithm": {"name": "ppo"}, "train": {"minibatches": 1, "epochs": 3}}


def _learn(model: Path, folder: Path) -> tuple[dict[str, float], Any, float, str]:
    """Metrics and state after GRPO's step with a bad reward; how many updates are skipped where their batches cannot be
    written; what ended PPO's step."""
    samples = [replace(sample, policy_version=0) for sample in make_samples(0)]
    for number in BAD_SAMPLES:
        samples[number] = replace(samples[number], reward=1.7e308)

    def prepare(name: str, case: dict[str, Any], axes: dict[str, int]) -> tuple[Any, ...]:
        config = make_config(model, {**case, "resources": {"ranks_per_node": 2}}, axes)
        run = make_run(config.model_copy(update={"run_dir": folder / name}), RunFolder(folder / name).attempt(1))
        _on_first_rank(lambda: _write_config(run))
        return run, *estimates(run, config.algorithm, samples)

    run, values, estimate = prepare("grpo", GRPO, {"pp": 2})
    state, section, place = RunState(), run.config.algorithm, run.context.run.skipped_updates
    metrics = run.updater.update_actor(section, state, samples, values, estimate)
    _on_first_rank(lambda: (place.rename(folder / "aside"), place.touch()))
    blocked = run.updater.update_actor(section, RunState(), samples, values, estimate)
    _on_first_rank(lambda: (place.unlink(), (folder / "aside").rename(place)))
    run.updater.update("actor", RunState(step=1), samples, {"advantages": values["old_log_probs"]}, _spoilt_loss)
    run, values, estimate = prepare("ppo", PPO, {"tp": 2})
    good = replace(estimate, returns=[np.ones_like(one) for one in estimate.advantages])
    run.updater.update_critic(RunState(), samples, values, good)
    saved = run.context.run.checkpoints / "step-00000001"
    _on_first_rank(lambda: [(saved / model).mkdir(parents=True) for model in ("actor", "critic")])
    run.actor.save(saved / "actor")
    run.critic.save(saved / "critic")
    with pytest.raises(NonFiniteError) as caught:
        run.updater.update_critic(RunState(), samples, values, estimate)
    return metrics, state, blocked["skipped_updates"], str(caught.value)


def _spoilt_loss(stats: Any, batch: Any) -> Any:
    """Not finite for sample 2, whose values are."""
    loss = (stats.log_probs * batch.loss_weight).sum() * (math.nan if 2 in batch.sample_ids else 1.0)
    return LossSums(loss, {"loss": loss.detach()})


def _on_first_rank(act: Callable[[], Any]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def _write_config(run: Any) -> None:
    run.context.attempt.path.mkdir(parents=True)
    for file in (run.context.run.config, run.context.attempt.config):
        write_atomic(file, dump_config(run.config))
