"""A commented starting configuration as text, from a few answers. Pure, without pydantic."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.config import yaml12

ALGORITHMS = {
    "grpo": "GRPO: advantages relative to a prompt's other responses",
    "dapo": "DAPO: GRPO with clip-higher, dynamic sampling and overlong shaping",
    "dr_grpo": "Dr. GRPO: GRPO without dividing by deviation and length",
    "gspo": "GSPO: one probability ratio per response",
    "cispo": "CISPO: importance weights bounded from above",
    "rloo": "RLOO: the baseline is the mean of the other responses",
    "reinforce_plus_plus": "REINFORCE++: rewards to go, whitened over the batch",
    "reinforce_plus_plus_baseline": "REINFORCE++-baseline: rewards minus the group's mean, whitened over the batch",
    "remax": "ReMax: the baseline is the greedy response",
    "ppo": "PPO: a critic predicts the return of every token",
}
REWARDS = {
    "maths": "rlhpc.rewards.rules:maths",
    "boxed": "rlhpc.rewards.rules:boxed",
    "exact": "rlhpc.rewards.rules:exact",
    "number": "rlhpc.rewards.rules:number",
    "python": "rlhpc.rewards.code:python",
}
_WIDTH = 40  # column of comments
_GROUPS = 64  # prompts per step, or more for more ranks
_COMMENTS = {
    "name": "the run folder is runs/<name>; or set run_dir",
    "model.path": "HuggingFace folder: config.json, safetensors, tokenizer",
    "resources.ranks_per_node": "one rank per GPU of a node",
    "slurm": "for `rlhpc submit`; docs/slurm.md",
    "slurm.time": "hours:minutes:seconds; the run continues in the next job",
    "data.train": "columns: docs/data.md",
    "data.validation": "held-out prompts",
    "data.max_prompt_tokens": "longer prompts are dropped",
    "actor.parallel": "ranks that share one copy of the model; docs/planning.md",
    "actor.optimizer.learning_rate": "2e-4 for a small model from scratch, 1e-6 for a pretrained one",
    "actor.memory": "recomputation and offload; docs/planning.md",
    "critic": "the value model, trained from the actor's weights",
    "rewards": "a list: functions and reward models are summed; docs/rewards.md",
    "rollout.tp": "ranks that share one vLLM engine",
    "rollout.samples_per_prompt": "responses to a prompt, compared with each other",
    "rollout.max_response_tokens": "longer responses are truncated",
    "algorithm": "docs/algorithms.md",
    "train.prompts_per_step": "over all ranks",
    "train.minibatches": "optimizer updates of a step",
    "train.tokens_per_microbatch": "memory of a rank in the update",
    "validation.every": "steps",
    "checkpoint.every": "steps; one is also saved before the job's time ends",
    "checkpoint.keep": "newest checkpoints",
    "planning.gpu": "for `rlhpc plan`",
}
# Keys that many set, as comments at the end of a section.
_HINTS = {
    "slurm": ("partition: gpu", "account: my-account", "modules: [cuda]"),
    "rollout": ("gpu_memory_utilization: 0.5", "temperature: 1.0"),
    "validation": ("samples_per_prompt: 4", "temperature: 1.0"),
}


@dataclass(frozen=True)
class Answers:
    """Answers that a starting configuration is made from. ``gpu``: a name such as h100, None if it is not known;
    ``reward``: a name of REWARDS, or an import path."""

    name: str
    model: str
    data: tuple[str, ...]
    validation: tuple[str, ...]
    algorithm: str
    reward: str
    nodes: int
    gpus: int
    gpu: str | None
    steps: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus


def starting_tree(answers: Answers) -> dict[str, Any]:
    """The configuration as nested values, without a layout: one rank per copy of the model."""
    name, function = answers.algorithm, REWARDS.get(answers.reward, answers.reward)
    rewards: list[dict[str, Any]] = [{"function": function}]
    train: dict[str, Any] = {
        "steps": answers.steps,
        "prompts_per_step": -(-_GROUPS // answers.ranks) * answers.ranks,
        "minibatches": 2,
    }
    if name == "dapo":
        rewards[0] = {"name": "correct", **rewards[0]}
        overlong = {"buffer_tokens": 256, "penalty": 0.5}
        rewards.append({"name": "overlong", "function": "rlhpc.rewards.formats:overlong", "arguments": overlong})
        train["dynamic_sampling"] = {"metric": "correct", "max_batches": 10}
    optimizer = {"learning_rate": 1e-6, "warmup_steps": 10}
    tree: dict[str, Any] = {
        "name": answers.name,
        "model": {"path": answers.model},
        "resources": {"ranks_per_node": answers.gpus},
        "slurm": {"nodes": answers.nodes, "time": "24:00:00"},
        "data": {
            "train": [*answers.data],
            **({"validation": [*answers.validation]} if answers.validation else {}),
            "max_prompt_tokens": 1024,
            "overlong_prompts": "drop",
        },
        "actor": {"parallel": {"tp": 1}, "optimizer": optimizer},
        "reference": {},
        "rewards": rewards,
        "rollout": {"tp": 1, "samples_per_prompt": 8, "max_response_tokens": 1024},
        "algorithm": {"name": name},
        "train": train,
        **({"validation": {"every": 10}} if answers.validation else {}),
        "checkpoint": {"every": 50, "keep": 2},
    }
    if name == "ppo":
        tree["critic"] = {"optimizer": {"learning_rate": 1e-5, "warmup_steps": 10}, "warmup_steps": 5}
    if answers.gpu is not None:
        tree["planning"] = {"gpu": answers.gpu}
    return tree


def merged(tree: Mapping[str, Any], fragment: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the values of a fragment, such as a layout that was searched."""
    found = dict(tree)
    for key, value in fragment.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def starting_text(tree: Mapping[str, Any], schema: str, file: str, title: str) -> str:
    """YAML with a comment on each key that needs one. ``schema``: path of the JSON schema, for editors."""
    head = [
        f"# yaml-language-server: $schema={schema}",
        f"# {title}.",
        f"#   rlhpc run {file} --check     what would run, and what is wrong",
        f"#   rlhpc plan run {file}        its memory and time",
        "# Keys that are not here have the defaults of docs/configuration.md.",
    ]
    lines = [line for key, value in tree.items() if value != {} for line in _key_lines(key, value, "")]
    return "\n".join([*head, *lines]) + "\n"


def _key_lines(key: str, value: Any, above: str) -> Iterator[str]:
    path, indent = f"{above}{key}", "  " * above.count(".")
    comment = _COMMENTS.get(path)
    if isinstance(value, Mapping):
        yield _commented(f"{indent}{key}:", comment)
        for name, one in value.items():
            yield from _key_lines(name, one, f"{path}.")
        yield from (f"{indent}  # {hint}" for hint in _HINTS.get(path, ()) if hint.partition(":")[0] not in value)
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        yield _commented(f"{indent}{key}:", comment)
        for one in value:
            for place, (name, inner) in enumerate(one.items()):
                yield f"{indent}  {'- ' if not place else '  '}{name}: {_flow(inner)}"
    else:
        yield _commented(f"{indent}{key}: {_flow(value)}", comment)


def _commented(line: str, comment: str | None) -> str:
    return line if comment is None else f"{line:<{_WIDTH}}  # {comment}"


def _flow(value: Any) -> str:
    """The value in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return value if _is_plain(value) else json.dumps(value)
    return json.dumps(value).replace("e-0", "e-")


def _is_plain(text: str) -> bool:
    """True if YAML reads the text as it is, also inside of a list."""
    return bool(re.fullmatch(r"[\w./~][\w./:~ +-]*", text)) and _reads_as(text)


def _reads_as(text: str) -> bool:
    try:
        return bool(yaml12.parse(f"[{text}]", "") == [text])
    except Exception:  # what YAML does not read
        return False
