"""verl's published claims, measured here: each in a process of its own, which prints a row of a table.

    python -m bench.claims                # all of them
    python -m bench.claims generate       # one

``docs/measurements/claims.md`` has the results. The published figures are of GPUs and of other tasks: what can be
compared is that an effect is there, and how large it is on a given task.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rollout import make_batch
from bench.workload import KL_COEFFICIENT, SEED, WORKLOADS, Workload, write_prompts

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
PROMPTS, SAMPLES, PROMPT, RESPONSE, REPLY = 4, 8, 448, 64, 16  # of the prefix cache


@contextlib.contextmanager
def model_of(name: str) -> Iterator[tuple[Workload, Path]]:
    """A workload and a folder with its random model."""
    from bench.models import build_model, build_tokenizer

    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory(prefix="bench-claims-") as folder, contextlib.redirect_stdout(sys.stderr):
        build_model(workload).save_pretrained(folder)
        build_tokenizer(workload).save_pretrained(folder)
        yield workload, Path(folder)


def engine_of(folder: Path, context: int, **section: Any) -> Any:
    """rlhpc's engine, awake and with the folder's weights."""
    from bench.rig import make_engine
    from rlhpc.models import read_model

    engine = make_engine(folder, read_model(folder), "float32", context, kv_cache_gib=0.5, **section)
    wake(engine, folder)
    return engine


def wake(engine: Any, folder: Path) -> None:
    from safetensors.torch import load_file

    engine.wake_weights()
    engine.load_weights(iter(load_file(folder / "model.safetensors").items()))
    engine.wake_cache()


def trainer_of(folder: Path) -> Any:
    """rlhpc's Megatron back end on this process alone, with an optimizer."""
    import torch.distributed as dist

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.model_settings import ModelSettings
    from rlhpc.config.training import OptimizerSection, ParallelSection
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.parallel.groups import build_groups
    from rlhpc.sharding.layout import make_layout

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    parallel, shape = ParallelSection(), read_model(folder)
    layout = make_layout(parallel, 1)
    build_groups(layout, seed=0)
    settings = ModelSettings(parallel, optimizer=OptimizerSection())
    backend = MegatronBackend(shape, layout, RankInfo.from_environ(), "float32", settings)
    backend.load_pretrained(folder)
    return backend


def sequences_of(workload: Workload) -> list[tuple[Any, int]]:
    """Tokens and prompt length of a third of a step's samples, with the workload's lengths."""
    import numpy as np

    rng = random.Random(SEED)
    return [
        (np.array([*prompt, *(rng.randrange(3, workload.vocab) for _ in range(length))], np.int32), len(prompt))
        for prompt, length in make_batch(workload)[::3]
    ]


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int = 2) -> dict[str, float]:
    """Median seconds of each way, which take turns; each has run once before."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def compare_updates(folder: Path, tokens: int, batches: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Seconds of one update by negative log-likelihood on each of the batches, of responses with so many tokens."""
    from bench.rig import likelihood_loss

    backend = trainer_of(folder)

    def update(name: str) -> None:
        backend.train(batches[name], likelihood_loss, tokens, 1.0, 1e-8)

    return alternate({name: lambda name=name: update(name) for name in batches})


def generate() -> tuple[str, str]:
    """Generation by the engine over HuggingFace's ``generate``: same model, prompts and lengths, one thread."""
    import torch
    from transformers import Qwen2ForCausalLM

    from rlhpc.api import Request

    with model_of("30m") as (workload, folder):
        batch = make_batch(workload)[::2]
        longest = max(len(prompt) for prompt, _ in batch)
        engine = engine_of(folder, workload.prompt_tokens[1] + workload.max_response, max_num_seqs=len(batch))
        requests = [Request(prompt, seed, length, 1.0) for seed, (prompt, length) in enumerate(batch)]
        torch.set_num_threads(1)
        model = Qwen2ForCausalLM.from_pretrained(folder).eval()
        tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt, _ in batch])
        steps = max(length for _, length in batch)
        sampling = {"do_sample": True, "top_k": 0, "min_new_tokens": steps, "max_new_tokens": steps}

        def huggingface() -> None:
            """Generates a whole batch until its longest response ends."""
            model.generate(tokens, attention_mask=(tokens != 0).long(), **sampling)

        seconds = alternate({"engine": lambda: engine.generate(requests), "huggingface": huggingface}, rounds=1)
    count = sum(length for _, length in batch)
    ours, theirs = seconds["engine"], seconds["huggingface"]
    return (
        f"**{theirs / ours:.1f} times**: {count / ours:,.0f} and {count / theirs:,.0f} tokens/s",
        f"32M parameters, {len(batch)} responses of {count / len(batch):.0f} tokens in the mean, at most {steps}",
    )


def packing(size: int = 4) -> tuple[str, str]:
    """Updates on packed sequences over updates on sequences padded to the longest of their microbatch."""
    import numpy as np

    from rlhpc.data.collate import pack_batch

    with model_of("30m") as (workload, folder):
        sequences, packed, padded, filling = sequences_of(workload), [], [], 0
        for first in range(0, len(sequences), size):
            part = sequences[first : first + size]
            ids, longest = range(first, first + len(part)), max(len(each) for each, _ in part)
            filling += sum(longest - len(each) for each, _ in part)
            packed.append(pack_batch(part, sample_ids=ids))
            masks = [np.arange(longest - prompt) < len(each) - prompt for each, prompt in part]
            whole = [(np.pad(each, (0, longest - len(each))), prompt) for each, prompt in part]
            padded.append(pack_batch(whole, sample_ids=ids, response_mask=masks))
        tokens = sum(len(each) - prompt for each, prompt in sequences)
        seconds = compare_updates(folder, tokens, {"packed": packed, "padded": padded})
    share = filling / (filling + sum(len(each) for each, _ in sequences))
    return (
        f"**{seconds['padded'] / seconds['packed'] - 1:+.0%}**",
        f"updates of 32M parameters, {size} sequences a microbatch, of which {share:.0%} would be padding",
    )


def microbatches(capacity: int = 2_048) -> tuple[str, str]:
    """Microbatches filled with tokens over microbatches of as many sequences as always fit."""
    from rlhpc.data.collate import pack_batch
    from rlhpc.data.packing import pack

    with model_of("30m") as (workload, folder):
        sequences = sequences_of(workload)
        tokens = sum(len(each) - prompt for each, prompt in sequences)
        count = capacity // (workload.prompt_tokens[1] + workload.max_response)
        (plan,) = pack([len(each) for each, _ in sequences], 1, capacity)
        ids = list(range(len(sequences)))
        groups = {
            "filled": [list(members) for members in plan.bins[0]],
            "fixed": [ids[first : first + count] for first in range(0, len(ids), count)],
        }
        batches = {
            name: [pack_batch([sequences[i] for i in group], sample_ids=group) for group in found]
            for name, found in groups.items()
        }
        seconds = compare_updates(folder, tokens, batches)
    return (
        f"**{seconds['fixed'] / seconds['filled'] - 1:+.0%}**: {len(groups['filled'])} microbatches for"
        f" {len(groups['fixed'])}",
        f"updates of 32M parameters, packed, {capacity:,} tokens or {count} sequences a microbatch; on a CPU small"
        " microbatches cost hardly more",
    )


def resharding(tp: int = 4) -> tuple[str, str]:
    """Direct weight sync over gathering whole tensors: memory and traffic; ``bench.reshard`` has more layouts."""
    from bench.reshard import MIB, RANKS, make_model, measure

    with tempfile.TemporaryDirectory() as name:
        size = make_model(Path(name), 6) / MIB
        costs = measure(Path(name), {"tp": 2, "pp": 2}, tp, 3)
    direct, gather = costs["direct"], costs["gather"]
    return (
        f"**{1 - direct.memory / gather.memory:.0%} less, {1 - direct.traffic / gather.traffic:.0%} less**;"
        f" {gather.seconds / direct.seconds:.1f} times as fast",
        f"{size:,.0f} MiB, trainer tp 2 pp 2 to an engine of tp {tp} on {RANKS} ranks",
    )


def balance(per_rank: int = 32) -> tuple[str, str]:
    """Work of ranks: samples distributed by cost over samples in the order of their prompts."""
    from rlhpc.data.packing import pack, sample_costs
    from tests.helpers.balance_table import CAPACITY, MODELS, drawn

    cells = []
    for ranks in (8, 64):
        lengths = drawn(per_rank * ranks, 0.7, seed=0)
        costs = sample_costs(lengths, *MODELS["7B"])
        (plan,) = pack(lengths, ranks, CAPACITY, costs=costs)
        by_cost = [sum(costs[i] for members in rank for i in members) for rank in plan.bins]
        in_order = [sum(costs[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]
        mean = sum(costs) / ranks
        cells.append(f"{max(in_order) / mean:.2f} to **{max(by_cost) / mean:.3f}** on {ranks} ranks")
    return "; ".join(cells), f"costs of a 7B model, {per_rank} samples a rank of log-normal length, spread 0.7"


def cache_case(workload: Workload, folder: Path) -> tuple[dict[str, Any], list[Any], tuple[int, ...]]:
    """An engine with a prefix cache and one without, requests for groups of samples of long prompts, and a reply."""
    from rlhpc.api import Request

    rng = random.Random(SEED)
    prompts = [tuple(rng.randrange(3, workload.vocab) for _ in range(PROMPT)) for _ in range(PROMPTS)]
    reply = tuple(rng.randrange(3, workload.vocab) for _ in range(REPLY))
    requests = [Request(prompt, seed, RESPONSE, 1.0) for prompt in prompts for seed in range(SAMPLES)]
    context = PROMPT + 2 * RESPONSE + REPLY
    engines = {
        name: engine_of(folder, context, max_num_seqs=len(requests), prefix_caching=name == "with")
        for name in ("with", "without")
    }
    return engines, requests, reply


def prefixes() -> tuple[str, str]:
    """Generation with a prefix cache over generation without: groups of samples of long prompts."""
    with model_of("30m") as case:
        engines, requests, _ = cache_case(*case)

        def once(name: str) -> None:
            engines[name]._in_flight.forget_prefixes()  # as after each weight sync
            engines[name].generate(requests)

        seconds = alternate({name: lambda name=name: once(name) for name in engines})
        hits = engines["with"].statistics()["engine/prefix_cache_hit_rate_mean"]
    return (
        f"**{seconds['without'] / seconds['with']:.1f} times** as fast; {hits:.0%} of the prompts' tokens are found",
        f"32M parameters, {PROMPTS} prompts of {PROMPT} tokens, {SAMPLES} samples each of {RESPONSE}",
    )


def turns() -> tuple[str, str]:
    """A second turn with a prefix cache over one without: each response goes on after a tool's reply."""
    from rlhpc.api import Request

    with model_of("30m") as case:
        engines, first, reply = cache_case(*case)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(3):
            for name, engine in engines.items():
                engine._in_flight.forget_prefixes()  # as after each weight sync
                answers = engine.generate(first)
                conversations = [(*r.prompt, *a.tokens.tolist(), *reply) for r, a in zip(first, answers, strict=True)]
                second = [Request(c, seed, RESPONSE, 1.0, later_turn=True) for seed, c in enumerate(conversations)]
                began = time.perf_counter()
                engine.generate(second)
                seconds[name].append(time.perf_counter() - began)
        hits = engines["with"].statistics()["engine/turn_cache_hit_rate_mean"]
        faster = min(seconds["without"]) / min(seconds["with"])
    return (
        f"**{faster:.1f} times** as fast; {hits:.0%} of the conversations' tokens are found",
        f"the same, after a reply of {REPLY} tokens, {RESPONSE} tokens more",
    )


def resident() -> int:
    """Bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def sleep(sequences: int = 64) -> tuple[str, str]:
    """Memory that an engine returns when it sleeps."""
    from rlhpc.api import Request

    with model_of("30m") as (_, folder):
        engine = engine_of(folder, PROMPT + RESPONSE, max_num_seqs=sequences, prefix_caching=False)
        for _ in range(2):  # once for what the first time allocates
            engine.sleep()
            asleep = resident()
            wake(engine, folder)
            engine.generate([Request((5,) * PROMPT, seed, RESPONSE, 1.0) for seed in range(sequences)])
            awake = resident()
        engine.sleep()
        freed, held = awake - resident(), awake - asleep
    return (
        f"**{freed / held:.0%}** of what it took awake: {freed / GIB:.2f} of {held / GIB:.2f} GiB",
        "32M parameters in float32, and 0.5 GiB of cache in use",
    )


def critic() -> tuple[str, str]:
    """Memory of a rank with GRPO over that with PPO, which has a critic."""
    import yaml

    from bench.grpo_step import Plan, rlhpc_config

    found = {}
    with model_of("30m") as (workload, model), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, workload.prompts(8))
        plan = Plan(folder, {}, processes=1, threads=1, steps=1, warmup=0)
        for algorithm in ("grpo", "ppo"):
            config = rlhpc_config(workload, plan, model, prompts)
            config["algorithm"] = {"name": algorithm, "kl": {"coefficient": KL_COEFFICIENT, "estimator": "k3"}}
            file, run = folder / f"{algorithm}.yaml", folder / algorithm
            file.write_text(yaml.safe_dump(config))
            command = [sys.executable, "-m", "rlhpc.cli.main", "run", str(file), "--run-dir", str(run)]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
            (record,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            found[algorithm] = record["memory/cpu_gib_max"]
    each = (found["ppo"] - found["grpo"]) * GIB / 32.0e6
    return (
        f"**{found['grpo']:.2f}** and {found['ppo']:.2f} GiB of a rank's process: {each:.0f} bytes a parameter of"
        " the critic",
        "32M parameters in float32 with a reference; weights, gradients and moments of a critic are 16 bytes",
    )


# The claim, the published figure, and the function that returns the figure here and its task.
CLAIMS: dict[str, tuple[str, str, Callable[[], tuple[str, str]]]] = {
    "generate": ("generation over HuggingFace's `generate`", "3 to 5 times", generate),
    "packing": ("packed sequences over padded ones", "+20 to 30%", packing),
    "microbatches": ("microbatches by tokens over a fixed number of sequences", "+50 to 100%", microbatches),
    "resharding": ("resharding over gathering: memory, communication", "30% less, 40% less", resharding),
    "balance": ("longest rank over the mean, balanced by cost", "balanced, no figure", balance),
    "prefixes": ("prefix caching", "faster, no figure", prefixes),
    "turns": ("prefix caching, across turns", "faster, no figure", turns),
    "sleep": ("memory that a sleeping engine returns", "weights and KV cache", sleep),
    "critic": ("memory without a critic (GRPO over PPO)", "less, no figure", critic),
}


def row(*cells: str) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1:]:
        # torch and vLLM read these when they are imported
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        what, published, measure = CLAIMS[sys.argv[1]]
        print(row(what, published, *measure()), flush=True)
        os._exit(0)  # vLLM's and Megatron's ends are slow
    print(row("what", "published", "here", "task"))
    print(row(*["---"] * 4), flush=True)
    commands = {name: [sys.executable, "-m", "bench.claims", name] for name in CLAIMS}
    codes = {n: subprocess.run(c, cwd=ROOT, stderr=subprocess.DEVNULL).returncode for n, c in commands.items()}
    if failed := [name for name, code in codes.items() if code]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
