"""Programs of ranks that train transformers models of any architecture, and serve them with vLLM beside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.api import Completion, Request
from rlhpc.config.rollout import RolloutSection
from rlhpc.config.schema import ReshardSection
from rlhpc.core.errors import ReshardError
from rlhpc.models import ModelDescription, describe_fields, read_config
from tests.backends.fsdp.backend_cases import make_backend
from tests.helpers.parts import parameters_of
from tests.helpers.tiny_models import make_model
from tests.rollout.engines import CHANGES, CONTEXT, VOCAB, worker

PROMPTS = [tuple(range(5, 25)), tuple((7 * i + 3) % 190 + 5 for i in range(90)), (42,)]
NATIVE = ("llama", "gemma2", "gemma3", "phi3", "mistral_window", "glm4", "granite", "gpt_oss", "qwen3moe", "dsv3")
BY_TRANSFORMERS = ("olmo2", "starcoder2", "smollm3")  # vLLM runs them through its Transformers back end
FLOAT32_ROUTER_WEIGHT = "model.layers.1.mlp.gate.weight"
SYNCS = 3


def make(folder: Path, kind: str, seed: int = 0) -> Path:
    """A tiny model whose weights differ by seed."""
    return make_model(
        folder, kind, seed, vocab_size=VOCAB, max_position_embeddings=CONTEXT, **CHANGES.get(kind, {}), eos_token_id=1
    )


def describe(folder: Path, rope_tokens: int | None = None) -> ModelDescription:
    """The model as one without a table, even of a known family."""
    from rlhpc.checkpoint.formats.described import read_tensors

    return describe_fields(read_config(folder, rope_tokens), str(folder), read_tensors(folder))


def build_engine(folder: Path, tp: int = 1, dtype: str = "float32", **section: Any) -> Any:
    from rlhpc.rollout.vllm_arguments import ServedModel
    from rlhpc.rollout.vllm_engine import VllmEngine

    section = {"tp": tp, "kv_cache_gib": 0.0625, "max_num_seqs": 8, **section}
    return VllmEngine(ServedModel(folder, describe(folder), dtype, 256, (1,)), RolloutSection(**section))


def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_manager(actor: Any, engine: Any, sides: Any = None, dtype: str = "float32", **section: Any) -> Any:
    """A manager that verifies every weight sync; ``sides``: those of an earlier one."""
    from rlhpc.reshard.discovered import GroupExchange, discover_sides
    from rlhpc.reshard.manager import Job, ReshardManager

    options = ReshardSection(**{"verify": "always", "bucket_mib": 1, **section})
    job = Job(2, getattr(torch, dtype), torch.device("cpu"))
    sides = sides or discover_sides(actor, engine, GroupExchange())
    return ReshardManager(actor, engine, sides, options, job)


def answers(engine: Any, seed: int = 7) -> list[Completion]:
    return list(engine.generate([Request(p, seed + i, 24, 1.0) for i, p in enumerate(PROMPTS)]))


def same(first: Sequence[Completion], second: Sequence[Completion]) -> bool:
    """Whether two lists of completions are equal to the last bit."""
    return all(
        a.tokens.tolist() == b.tokens.tolist() and a.log_probs.tolist() == b.log_probs.tolist()
        for a, b in zip(first, second, strict=True)
    )


@torch.no_grad()
def distance(model: Any, completions: Sequence[Completion]) -> float:
    """Maximum difference of an engine's log-probs from those of plain transformers."""
    found = 0.0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion.tokens.tolist()]])
        log_probs = model(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1)
        expected = log_probs[len(prompt) - 1 : -1].gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        found = max(found, float((expected - torch.tensor(completion.log_probs)).abs().max()))
    return found


@dataclass
class Served:
    """What was found of one architecture. ``distances``: after each weight sync."""

    distances: list[float] = field(default_factory=list)
    early: float = 0.0  # of a model built before the engine; others are built after it
    repeated: bool = False  # the same weights again: equal to the last bit
    direct: bool = False  # the same weights by blocks: equal to the last bit
    streamed: list[tuple[int, int]] = field(default_factory=list)  # tensors and bytes of each weight sync
    whole: tuple[int, int] = (0, 0)  # the model's
    alive: int = 0  # most whole tensors at once
    fault: str = ""
    by_transformers: bool = False
    numel: tuple[int, int] = (0, 0)  # elements of this rank's parameters, and as planned


def serve(folder: Path, kinds: Sequence[str], tp: int) -> dict[str, Served]:
    """Weight syncs of each architecture through whole tensors and by blocks. Runs on every rank."""
    return {kind: _serve(folder / kind, tp) for kind in kinds}


def _serve(folder: Path, tp: int) -> Served:
    early = plain_model(folder / "0")
    engine, actor = build_engine(folder / "0", tp), make_backend(folder / "0")
    manager = make_manager(actor, engine, method="gather")
    found = Served(by_transformers=_is_by_transformers(engine), numel=_numels(engine, folder / "0", tp))
    completions: list[Completion] = []
    for seed in range(SYNCS):
        actor.load_pretrained(folder / str(seed))
        with _watched(actor, found):
            manager.sync()
        completions = answers(engine)
        found.distances.append(distance(plain_model(folder / str(seed)), completions))
        found.early += distance(early, completions) if seed == 0 else 0.0
        found.streamed.append((manager.streamed.tensors, manager.streamed.bytes))
        engine.sleep()
    manager.sync()
    found.repeated = same(answers(engine), completions)
    engine.sleep()
    with _spoilt(actor):
        try:
            manager.sync()
        except ReshardError as error:
            found.fault = str(error)
    engine.sleep()
    direct = make_manager(actor, engine, manager.sides)
    direct.sync()
    found.direct = same(answers(engine), completions)
    found.whole = (len(actor.weights.weights), sum(4 * _numel(weight) for weight in actor.weights.weights))
    engine.shutdown()
    return found


def _numel(weight: Any) -> int:
    return int(torch.Size(weight.tensor.shape).numel())


def _numels(engine: Any, folder: Path, tp: int) -> tuple[int, int]:
    from rlhpc.plan.estimates.engine_weights import engine_numel
    from rlhpc.sharding.engine_shards import EngineLayout

    real = sum(int(torch.Size(shape).numel()) for shape in engine._weights.shapes.values())
    return real, engine_numel(describe(folder), EngineLayout(tp))


def _is_by_transformers(engine: Any) -> bool:
    from vllm.model_executor.models.transformers.base import Base

    return isinstance(worker(engine).model_runner.get_model(), Base)


def train_and_serve(folder: Path) -> dict[str, Any]:
    """Trains a model built before the engine and one built after it, and serves what they have learnt."""
    from tests.helpers.training import optimizer_section, update

    early = make_backend(folder, optimizer=optimizer_section())
    engine = build_engine(folder)
    late = make_backend(folder, optimizer=optimizer_section())
    manager = make_manager(late, engine)
    found: dict[str, Any] = {"distances": [], "equal": [], "by_transformers": _is_by_transformers(engine)}
    for _ in range(SYNCS):
        norms = [update(backend).grad_norm for backend in (early, late)]
        pairs = zip(early.full_tensors(), late.full_tensors(), strict=True)
        found["equal"].append(norms[0] == norms[1] and all(torch.equal(a, b) for (_, a), (_, b) in pairs))
        manager.sync()
        found["distances"].append(_from_trainer(early, answers(engine)))
        engine.sleep()
    engine.shutdown()
    return found


def in_bfloat16(folder: Path) -> dict[str, Any]:
    """Weight syncs from float32 shards to an engine in bfloat16, which has some parameters in float32."""
    from tests.helpers.training import optimizer_section

    engine = build_engine(folder, dtype="bfloat16")
    actor = make_backend(folder, optimizer=optimizer_section(), dtype="bfloat16")
    found: dict[str, Any] = {name: str(dtype) for name, dtype in engine._weights.dtypes.items()}
    completions, sides = [], None
    for method in ("gather", "direct"):
        manager = make_manager(actor, engine, sides, "bfloat16", method=method)
        sides = manager.sides
        manager.sync()
        completions.append(answers(engine))
        engine.sleep()
    shard = next(s for s in sides.target[0] if s.tensor.name == FLOAT32_ROUTER_WEIGHT)
    write = manager.write

    def spoil() -> None:
        write()
        parameters_of(manager)[shard.local_name][0, 0] += 1e-6  # less than bfloat16 would show

    manager.write = spoil
    try:
        manager.sync()
    except ReshardError as error:
        found["fault"] = str(error)
    found["same"] = same(*completions)
    engine.shutdown()
    return found


def _from_trainer(backend: Any, completions: Sequence[Completion]) -> float:
    """Maximum difference of an engine's log-probs from the trainer's."""
    from rlhpc.data.collate import pack_batch

    rows = [(np.array([*p, *c.tokens]), len(p)) for p, c in zip(PROMPTS, completions, strict=True)]
    batch = pack_batch(rows, sample_ids=list(range(len(rows))))
    (stats,) = backend.log_probs([batch], 1.0)
    theirs = torch.cat([torch.tensor(completion.log_probs) for completion in completions])
    return float((stats.log_probs[batch.mask.bool()] - theirs).abs().max())


@contextlib.contextmanager
def _watched(actor: Any, found: Served) -> Iterator[None]:
    """Counts the whole tensors that exist when the next one is passed."""
    import weakref

    full_tensors, alive = actor.full_tensors, []

    def watch() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in full_tensors():
            alive.append(weakref.ref(tensor.untyped_storage()))
            found.alive = max(found.alive, sum(own() is not None for own in alive))
            yield name, tensor
            del tensor

    actor.full_tensors = watch
    try:
        yield
    finally:
        actor.full_tensors = full_tensors


@contextlib.contextmanager
def _spoilt(actor: Any) -> Iterator[None]:
    """Changes one row of one tensor on its way into the engine."""
    full_tensors = actor.full_tensors

    def spoil() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in full_tensors():
            if name == "model.layers.1.self_attn.o_proj.weight":
                tensor[5] *= 1.001
            yield name, tensor

    actor.full_tensors = spoil
    try:
        yield
    finally:
        actor.full_tensors = full_tensors
