"""Finds the inputs of a run that are not on this machine: `rlhpc submit --dry-run` works without them.

A file that is there in any way, such as a link to nothing, is not absent: it is checked, and refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlhpc.checkpoint.formats.megatron_folder import TRACKER
from rlhpc.checkpoint.formats.model_folder import DATA_SUFFIXES, TOKENIZERS
from rlhpc.config.schema import RunConfig

# Keys of what is absent besides data files: weights and tokenizer of the actor, weights of the reward model, and of the
# model that guesses tokens.
WEIGHTS, TOKENIZER, REWARD_MODEL, DRAFT_MODEL = "weights", "tokenizer", "reward_model", "draft_model"
_CHECKPOINT = (".metadata", "metadata.json", ".distcp", TRACKER)
_WEIGHTS = (".safetensors", ".safetensors.index.json", *_CHECKPOINT, ".bin", ".pt", ".pth")


def absent_inputs(config: RunConfig) -> dict[str, str]:
    """Absent inputs in words, by config key, or by a key of this module."""
    return dict(_absent(config))


def not_checked(absent: dict[str, str]) -> list[str]:
    """A warning for each absent input."""
    return [f"not checked: {text}" for text in absent.values()]


def data_files(config: RunConfig) -> dict[str, list[Path]]:
    """Prompt and warm-up files by the config key of their list."""
    return {
        "data.train": [file.path for file in config.data.train],
        "data.validation": [file.path for file in config.data.validation],
        "sft.data": config.sft.data if config.sft is not None else [],
    }


def _absent(config: RunConfig) -> Iterator[tuple[str, str]]:
    folder, weights = config.model.path, config.model.weights
    if not _has(weights or folder, _WEIGHTS):
        key = "model.path" if weights is None else "model.weights"
        yield WEIGHTS, f"{key}: no weights in {str(weights or folder)!r} on this machine"
    if not _has(folder, TOKENIZERS):
        yield TOKENIZER, f"model.path: no tokenizer in {str(folder)!r} on this machine"
    section = config.reward_model
    if section is not None and not _has(section.model, _WEIGHTS):
        yield REWARD_MODEL, f"{config.reward_model_key}.model: no weights in {str(section.model)!r} on this machine"
    guesses = config.rollout.speculative
    if guesses is not None and guesses.model is not None and not _has(guesses.model, _WEIGHTS):
        yield DRAFT_MODEL, f"rollout.speculative.model: no weights in {str(guesses.model)!r} on this machine"
    for key, paths in data_files(config).items():
        for index, path in enumerate(paths):
            if path.suffix in DATA_SUFFIXES and _is_absent(path):
                yield f"{key}.{index}", f"{key}.{index}: no file {str(path)!r} on this machine"


def _has(folder: Path, endings: tuple[str, ...]) -> bool:
    """True if the folder has an entry with one of these endings, or cannot be read."""
    try:
        return any(name.endswith(endings) for name in os.listdir(folder))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _is_absent(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False
