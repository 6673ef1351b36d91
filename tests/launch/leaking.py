"""User code that lets secrets out in every way that it can, for tests."""

from __future__ import annotations

import logging
import os
import sys
from hashlib import sha256
from typing import Any

from rlhpc.config.load import load_config
from rlhpc.core.context import RankContext
from rlhpc.core.errors import UserError
from rlhpc.core.exits import write_exit

# Secrets of the environment, by name: with each, a value that no other has.
PLANTED = {
    name: f"Plant3d+{number:02d}/{name.lower()[::-1].replace('_', 'Q')}"
    for number, name in enumerate(
        (
            "WANDB_API_KEY",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "MLFLOW_TRACKING_PASSWORD",
            "MLFLOW_TRACKING_TOKEN",
            "OPENAI_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "SLURM_JWT",
            "SITE_SIGNING_KEY",
            "SITE_PROXY_TOKEN",
            "SITE_CLIENT_SECRET",
            "PGPASSWORD",
        )
    )
}
URL_SECRET = "Plant3d-inTheUrl"
PROXY = f"http://someone:{URL_SECRET}@proxy.example:3128"


def digest(*values: str) -> str:
    return sha256("\n".join(values).encode()).hexdigest()


def _everything() -> str:
    return f"{dict(os.environ)} --token {os.environ['SITE_PROXY_TOKEN']} {os.environ['HTTPS_PROXY']}"


def prepare(folder: str, hub_token: str) -> None:
    """Prints what it got."""
    print("prepared with", hub_token, _everything())
    print("prepared with", hub_token, _everything(), file=sys.stderr)
    os.makedirs(folder, exist_ok=True)


def score(solution_str: str, judge_api_key: str, endpoint: str, **row: Any) -> float:
    """Prints all that it knows, and fails for half of the responses with an error that has it."""
    print(judge_api_key, endpoint, _everything())
    print(judge_api_key, endpoint, _everything(), file=sys.stderr)
    if len(solution_str) % 2:
        raise RuntimeError(f"401 for {judge_api_key} at {endpoint} with {_everything()}")
    return len(solution_str) / 10


def say_all(context: RankContext) -> None:
    """Prints and logs environment and config, and succeeds. The config must be whole."""
    config = load_config(context.attempt.config)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    logging.getLogger("leaking").info("%s %r", _everything(), config)
    print(_everything(), config.model_dump())
    for line in (_everything(), repr(config)):
        sys.stdout.writelines([line, "\n"])
    arguments: dict[str, Any] = config.rewards[0].arguments  # type: ignore[union-attr]
    assert digest(arguments["judge_api_key"], arguments["endpoint"]) == os.environ["EXPECTED"], "the ranks get them"
    metrics = '{"phase": "rl", "step": 1, "total_steps": 1, "time": 0.0, "reward/mean": 0.5}\n'
    context.run.metrics.write_text(metrics)


def raise_all(context: RankContext) -> None:
    """Raises an error whose message and cause have everything."""
    try:
        raise KeyError(_everything())
    except KeyError as error:
        raise RuntimeError(f"401 for {_everything()} with {load_config(context.attempt.config)!r}") from error


def refuse_all(context: RankContext) -> None:
    """Raises an error of the user with everything, caused by another."""
    try:
        raise KeyError(_everything())
    except KeyError as error:
        raise UserError(f"cannot use {_everything()}", where=os.environ["HTTPS_PROXY"], remedy="change it") from error


def record_all(context: RankContext) -> None:
    """Leaves a record by hand, and dies."""
    write_exit(context.attempt.exits, context.info, OSError(5, _everything(), _everything()))
    os._exit(1)
