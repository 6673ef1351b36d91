"""Compares layouts with one rank: a HuggingFace model trained by PyTorch.

``make_reference`` trains the model for some steps and stores logits, losses, gradients and weights. ``try_cases`` runs
layouts on real ranks and returns their distances from the reference. ``python -m tests.helpers.equality`` runs every
family on every axis and random combinations, and prints a table.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open

from rlhpc.backends.megatron import backend as module
from rlhpc.backends.megatron.weights import block_of
from tests.helpers.distributed import run_ranks
from tests.helpers.parts import chunks_of
from tests.helpers.tiny_models import KINDS, make_model
from tests.helpers.training import TOKENS, batches_of, logits_of, make_actor, optimizer_section, sequences, train

ROOT = Path(__file__).parents[2]
FROM_OUTSIDE = {"mistral": "my_family:MISTRAL"}  # docs/examples/my_family.py
STEPS = 3
LAYERS = 4
BUCKET = 100_000  # elements


@dataclass(frozen=True)
class Case:
    """A model on a layout; dp takes the remaining ranks."""

    kind: str
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    cp_method: str = "all_gather"
    expert_dispatch: str = "alltoall"
    sequence_parallel: bool = True

    def __str__(self) -> str:
        changed = [f for f in fields(self) if f.name != "kind" and getattr(self, f.name) != f.default]
        return " ".join([self.kind, *(f"{f.name}={getattr(self, f.name)}" for f in changed)])


@dataclass(frozen=True)
class Distance:
    """Distance of a case from the reference, maximum over ranks, tensors and steps."""

    logits: float  # absolute
    loss: float  # relative
    grad_norm: float  # relative
    gradient: float  # relative to a tensor's largest element, after clipping
    weight: float  # absolute, after the last step

    @property
    def is_small(self) -> bool:
        return (
            self.logits < 1e-5 and self.loss < 1e-5 and max(self.grad_norm, self.gradient) < 1e-4 and self.weight < 1e-5
        )


def make_reference(folder: Path, kind: str) -> Path:
    """Make a model of ``kind`` and train it in PyTorch."""
    make_model(folder / "start", kind, num_hidden_layers=LAYERS)
    return train_reference(folder)


def train_reference(folder: Path) -> Path:
    """Train folder/start; tensors go to folder/{gradients,end}, losses, norms and logits to results.pt."""
    from transformers import AutoModelForCausalLM

    start = folder / "start"
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, attn_implementation="eager")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Biases of a layer's experts are one matrix here.
    decays = {name for name, p in trained.items() if p.dim() > 1 and not name.endswith("bias")}
    params, options = list(trained.values()), optimizer_section()
    groups = [
        {"params": [p for name, p in trained.items() if name in decays], "weight_decay": options.weight_decay},
        {"params": [p for name, p in trained.items() if name not in decays], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=(options.beta1, options.beta2), eps=options.epsilon
    )
    with torch.no_grad():
        logits = [model(s[None]).logits[0] for s in sequences()]
    numbers = []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = torch.zeros(())
        for s in sequences():
            log_probs = model(s[None]).logits[0, :-1].log_softmax(-1)
            loss = loss - log_probs.gather(-1, s[1:, None]).sum()
        loss = loss / TOKENS
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, options.max_grad_norm)
        if step == 0:
            save_gradients(model, folder / "gradients")
        adamw.step()
        numbers.append((loss.item(), norm.item()))
    model.save_pretrained(folder / "end")
    torch.save({"logits": logits, "numbers": numbers}, folder / "results.pt")
    return folder


def save_gradients(model: Any, folder: Path) -> None:
    """Save gradients with the names and shapes of saved weights, which differ from those of the modules."""
    values = {param: param.data for param in model.parameters()}
    for param in values:
        param.data = param.grad.clone() if param.grad is not None else param.data.new_zeros(param.shape)
    model.save_pretrained(folder)
    for param, data in values.items():
        param.data = data


def try_cases(references: dict[str, Path], cases: Sequence[Case]) -> list[Distance]:
    """Distance of each case, each with its own process groups. Runs on every rank of a job."""
    return [_try(references[case.kind], case) for case in cases]


def actor(folder: Path, case: Case, optimizer: Any = None, experts: Any = None, memory: Any = None) -> Any:
    """A back end with the weights of ``folder`` in the layout of ``case``, after leaving a former layout's groups.

    Gradients are reduced in several buckets during the backward pass, as in a real model.
    """
    leave_former()
    sys.path.insert(0, str(ROOT / "docs" / "examples"))
    axes = {f.name: getattr(case, f.name) for f in fields(case) if f.name != "kind"}
    distribute = module.distribute
    module.distribute = functools.partial(distribute, bucket=BUCKET)
    try:
        backend = make_actor(folder, optimizer, memory, experts=experts, family=FROM_OUTSIDE.get(case.kind), **axes)
    finally:
        module.distribute = distribute
    if optimizer is not None:
        assert all(chunk.ddp_config.overlap_grad_reduce for chunk in chunks_of(backend))
    _former.append(backend)
    return backend


_former: list[Any] = []
_lasting_groups: set[Any] = set()


def keep_groups() -> None:
    """Let the current process groups, such as an engine's, outlive a change of layout."""
    _lasting_groups.clear()
    _lasting_groups.update(dist.distributed_c10d._world.pg_map)


def leave_former() -> None:
    """Destroy the previous back end's groups, each of which has a thread that wakes up 100 times per second."""
    if not parallel_state.model_parallel_is_initialized():
        return
    for backend in _former:
        for chunk in chunks_of(backend):
            vars(chunk).clear()  # hooks in autograd's nodes refer to the wrapper, invisible to gc
        del chunk, backend
    _former.clear()
    parallel_state.destroy_model_parallel()
    parallel_state._global_process_group_list = None
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group not in _lasting_groups:
            dist.destroy_process_group(group)
    gc.collect()


def _try(reference: Path, case: Case) -> Distance:
    results = torch.load(reference / "results.pt")
    backend = actor(reference / "start", case, optimizer_section())
    batches = batches_of(backend)
    logits = 0.0
    for batch, ours in zip(batches, logits_of(backend, batches), strict=False):
        expected = torch.cat([results["logits"][i] for i in batch.sample_ids])
        logits = max(logits, float((ours[:, : expected.size(-1)] - expected).abs().max()))
    numbers = train(backend, 1)
    gradient = max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-4))
        for ours, theirs in beside(gradients(backend), reference / "gradients")
    )
    numbers += train(backend, STEPS - 1)
    weight = max(
        float((ours - theirs).abs().max()) for ours, theirs in beside(backend.full_tensors(), reference / "end")
    )
    apart = [
        [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(numbers, results["numbers"], strict=True)
    ]
    return Distance(logits, max(x[0] for x in apart), max(x[1] for x in apart), gradient, weight)


def beside(ours: Iterator[tuple[str, Any]], folder: Path) -> Iterator[tuple[Any, Any]]:
    """Pairs of our tensor and the one with the same name in the folder's files."""
    theirs = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            theirs.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    names = set()
    for name, tensor in ours:
        names.add(name)
        yield tensor, theirs[name]
    assert names == set(theirs)


def gradients(backend: Any) -> Iterator[tuple[str, Any]]:
    """Full gradients of the last update, of which each data-parallel rank has reduced only its shard."""
    for chunk in chunks_of(backend):
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)

    def gradient(shard: Any) -> Any:
        param = backend.weights.parameter(shard)
        return block_of(param.main_grad if hasattr(param, "main_grad") else param, shard)

    return backend.weights.full_tensors(gradient, torch.float32)


def single_axes(kinds: Sequence[str] = tuple(KINDS)) -> list[Case]:
    """Every family on every axis that it supports, for 8 ranks."""
    cases = []
    for kind in kinds:
        cases += [
            Case(kind),
            Case(kind, tp=2),
            Case(kind, tp=4),
            Case(kind, pp=2),
            Case(kind, pp=4),
            Case(kind, tp=2, pp=2, vpp=2),  # pp and vpp alone leave too few microbatches for a steady state
            Case(kind, pp=2, first_stage_layers=1, last_stage_layers=3),
            Case(kind, cp=2),
            Case(kind, cp=4),
            Case(kind, cp=2, cp_method="ulysses"),
            Case(kind, cp=4, cp_method="ulysses"),
        ]
        if _has_experts(kind):
            cases += [
                Case(kind, ep=2),
                Case(kind, ep=4),
                Case(kind, ep=2, expert_dispatch="allgather"),
                Case(kind, etp=2),
                Case(kind, ep=2, etp=2),
                Case(kind, ep=2, etp=2, expert_dispatch="allgather"),
                Case(kind, tp=2, pp=2, vpp=2, ep=2, expert_dispatch="allgather"),
            ]
        elif kind != "qwen2_tied":
            cases.append(Case(kind, tp=2, sequence_parallel=False))
    return cases


def random_cases(count: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Case]:
    """Random combinations of several axes for 8 ranks and 4 layers."""
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        kind = rng.choice(kinds)
        sizes = [(2, 2, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 2, 1), (2, 4, 1), (1, 4, 2), (4, 1, 2)]
        tp, pp, cp = rng.choice(sizes)
        ep, etp = rng.choice([(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)]) if _has_experts(kind) else (1, 1)
        if 8 % (ep * etp * pp):
            continue
        method = rng.choice(["all_gather", "ulysses"]) if cp > 1 and 4 // tp % cp == 0 else "all_gather"
        uneven = rng.choice([{}, {"first_stage_layers": 1, "last_stage_layers": 3}]) if pp == 2 else {}
        vpp = rng.choice([None, 2]) if pp == 2 and not uneven else None
        dispatch = rng.choice(["alltoall", "allgather"]) if _has_experts(kind) else "alltoall"
        case = Case(kind, tp, pp, vpp, cp, ep, etp, **uneven, cp_method=method, expert_dispatch=dispatch)
        if case not in cases:
            cases.append(case)
    return cases


def _has_experts(kind: str) -> bool:
    return kind.startswith(("mixtral", "qwen3moe", "dsv3"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--random", type=int, default=20, help="number of random combinations")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = single_axes(options.kinds) + random_cases(options.random, options.seed, options.kinds)
    with tempfile.TemporaryDirectory() as name:
        kinds = {case.kind for case in cases}
        references = {kind: make_reference(Path(name) / kind, kind) for kind in sorted(kinds)}
        ranks = run_ranks(try_cases, 8, references, cases, timeout=7200)
    worst = [Distance(*(max(getattr(d, f.name) for d in row) for f in fields(Distance))) for row in zip(*ranks)]  # noqa: B905
    print("case | " + " | ".join(f.name for f in fields(Distance)))
    for case, distance in zip(cases, worst, strict=True):
        row = " | ".join(f"{getattr(distance, f.name):.1e}" for f in fields(Distance))
        print(f"{case} | {row}{'' if distance.is_small else '  <-- too far'}")
    near = sum(distance.is_small for distance in worst)
    print(f"{near} of {len(cases)} equal")
    sys.exit(near < len(cases))


if __name__ == "__main__":
    from tests.helpers import equality  # ranks look functions up by their module's name

    equality.main()
