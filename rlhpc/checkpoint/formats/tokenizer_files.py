"""Checks a model folder's tokenizer without transformers: ids, vocabulary, chat template."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.inputs import COPY_AGAIN, MIB, read_input, read_json_object

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_MOST = 512 * MIB  # of a tokenizer.json; the largest published ones have 40 MB


def check_tokenizer(folder: Path, vocab_size: int, *, chat_template: bool | Path) -> int:
    """Checks that the tokenizer's ids are in the model's vocabulary, and that the chat template exists if required.

    Returns the largest id plus one, or 0 if there is no tokenizer.json but another format. Raises UserError.
    """
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(
            "no tokenizer: none of " + ", ".join(TOKENIZERS),
            where=str(folder),
            remedy="save the tokenizer into the model folder with save_pretrained",
        )
    if isinstance(chat_template, Path):
        _check_template(chat_template)
    elif chat_template and not _has_chat_template(folder):
        raise UserError(
            f"the tokenizer in {str(folder)!r} has no chat template",
            where="data.chat_template",
            remedy="set it to false, or add chat_template.jinja to the folder",
        )
    file = folder / "tokenizer.json"
    if not file.is_file():
        return 0
    size = _largest_id(read_json_object(file, _MOST), file) + 1
    if size > vocab_size:
        raise UserError(
            f"token ids go up to {size - 1}, but config.json has vocab_size {vocab_size}",
            where=str(file),
            remedy="use the tokenizer that belongs to the model",
        )
    return size


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether both folders' tokenizer.json assign the same ids to the same tokens."""
    files = one / "tokenizer.json", other / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return False
    if filecmp.cmp(files[0], files[1], shallow=False):
        return True
    first, second = (read_json_object(file, _MOST) for file in files)
    return all(first.get(part) == second.get(part) for part in ("model", "added_tokens"))


def _largest_id(tokenizer: dict[str, Any], file: Path) -> int:
    """Largest id in the vocabulary (a mapping to ids, or for unigram models a list) and the added tokens."""
    model, added = tokenizer.get("model", {}), tokenizer.get("added_tokens") or []
    vocab = model.get("vocab", {}) if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list):
        raise UserError("has no vocabulary (model.vocab)", where=str(file), remedy=COPY_AGAIN)
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise UserError("added_tokens is not a list of tokens", where=str(file), remedy=COPY_AGAIN)
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))]
    ids += [token.get("id") for token in added]
    for number in ids:
        if type(number) is not int or number < 0:
            raise UserError(f"{str(number)[:80]} is not a token's id", where=str(file), remedy=COPY_AGAIN)
    return max(ids, default=-1)


def _check_template(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"no such file {str(path)!r}", where="data.chat_template", remedy="correct it")
    try:
        read_input(path).decode()
    except (UserError, UnicodeDecodeError) as error:
        wrong = error.message if isinstance(error, UserError) else f"is not UTF-8 ({error})"
        raise UserError(f"{str(path)!r} {wrong}", where="data.chat_template", remedy="correct the file") from None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        return False
    template = read_json_object(settings).get("chat_template")
    if template is not None and not isinstance(template, str | list):
        raise UserError("chat_template is not a text", where=str(settings), remedy=COPY_AGAIN)
    return bool(template)
