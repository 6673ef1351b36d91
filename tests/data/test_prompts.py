"""Reading prompt files, and taking prompts from them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from rlhpc.config.data import DataSection
from rlhpc.core.errors import UserError
from rlhpc.data.prompts import PromptFiles, Prompts, PromptSet, Readers
from rlhpc.data.tokenizer import Tokenizer
from tests.helpers.waiting import PATIENCE


def row(text: str = "1+2=", **changes: Any) -> dict[str, Any]:
    full = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7},
        **changes,
    }
    return {name: value for name, value in full.items() if value is not ...}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    return path


def load(tokenizer: Tokenizer, *paths: Path | dict[str, Any], **section: Any) -> PromptSet:
    """``paths`` may be entries of data.train as a configuration has them."""
    parsed = DataSection.model_validate({"train": list(paths), **section})
    return PromptSet.load(PromptFiles(parsed.train, "data.train", filtered=True), parsed, tokenizer)


def test_a_row_becomes_a_prompt(tokenizer: Tokenizer, tmp_path: Path):
    (prompt,) = load(tokenizer, write(tmp_path / "a.jsonl", row())).prompts
    assert (prompt.prompt_id, prompt.data_source, prompt.ground_truth) == (0, "sums", "3")
    assert prompt.extra_info == {"index": 7}
    assert tokenizer.decode(prompt.tokens, special=True) == "<|user|>1+2=<|assistant|>"


def test_parquet_and_jsonl_give_the_same_prompts(tokenizer: Tokenizer, tmp_path: Path):
    rows = [row("1+2="), row("2+2=", ability="maths")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = load(tokenizer, write(tmp_path / "a.jsonl", *rows))
    assert list(load(tokenizer, tmp_path / "a.parquet").prompts) == list(lines.prompts)


def test_prompt_ids_count_rows_over_all_files(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    first = write(tmp_path / "a.jsonl", row(), row("1" * 50), row())
    second = write(tmp_path / "b.jsonl", row())
    prompts = load(tokenizer, first, second, max_prompt_tokens=20, overlong_prompts="drop")
    assert [p.prompt_id for p in prompts.prompts] == [0, 2, 3]
    assert prompts.dropped == 1
    assert "data.train: 1 of 4 prompts dropped, longer than data.max_prompt_tokens 20" in caplog.text


def test_taking_is_a_pure_function_of_cursor_and_seed(tokenizer: Tokenizer, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *[row() for _ in range(10)])
    one, other = load(tokenizer, path), load(tokenizer, path)
    whole, end = one.take(0, 35, seed=1)
    assert end == 35
    in_parts, cursor = [], 0
    while cursor < 35:
        part, cursor = other.take(cursor, 7, seed=1)
        in_parts += part
    assert in_parts == whole
    assert other.take(14, 7, seed=1)[0] == whole[14:21]


def test_each_epoch_has_every_prompt_in_its_own_order(tokenizer: Tokenizer, tmp_path: Path):
    prompts = load(tokenizer, write(tmp_path / "a.jsonl", *[row() for _ in range(10)]))
    ids = [p.prompt_id for p in prompts.take(0, 30, seed=1)[0]]
    epochs = [ids[:10], ids[10:20], ids[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids != [p.prompt_id for p in prompts.take(0, 30, seed=2)[0]]


def test_unshuffled_prompts_come_in_file_order(tokenizer: Tokenizer, tmp_path: Path):
    prompts = load(tokenizer, write(tmp_path / "a.jsonl", *[row() for _ in range(3)]), shuffle=False)
    assert [p.prompt_id for p in prompts.take(2, 4, seed=1)[0]] == [2, 0, 1, 2]


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_missing_column_names_file_row_and_what_is_there(tokenizer: Tokenizer, tmp_path: Path, column: str):
    path = write(tmp_path / "a.jsonl", row(), row(**{column: ...}))
    with pytest.raises(UserError) as caught:
        load(tokenizer, path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: column {column!r} is missing; add it; the row has ")
    assert "'extra_info'" in message


def test_a_missing_parquet_column_names_the_row(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row(), row(prompt=None)]), path)
    with pytest.raises(UserError, match=r"a\.parquet: row 2: column 'prompt' is null"):
        load(tokenizer, path)


def test_broken_json_names_file_and_line(tokenizer: Tokenizer, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row())
    path.write_text(path.read_text() + '{"prompt": \n')
    with pytest.raises(UserError, match=rf"^{path}:2: broken JSON \(Expecting value.*; correct or remove"):
        load(tokenizer, path)


def test_bytes_that_are_no_text_name_file_and_line(tokenizer: Tokenizer, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row())
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=rf"^{path}:2: broken JSON \(.*can't decode"):
        load(tokenizer, path)


def test_half_a_pair_of_surrogates_names_file_and_line(tokenizer: Tokenizer, tmp_path: Path):
    """No tokenizer takes it, and no file of samples."""
    whole = write(tmp_path / "a.jsonl", row("\U0001f600"), row(r"C:\\ud"))
    assert len(load(tokenizer, whole)) == 2
    for changes in ({"text": "\ud83d"}, {"reward_model": {"ground_truth": "\ud83d"}}):
        path = write(tmp_path / "b.jsonl", row(), row(**changes))
        with pytest.raises(UserError, match=rf"^{path}:2: broken JSON \(.*surrogates not allowed"):
            load(tokenizer, path)


def test_an_overlong_prompt_names_file_row_length_and_limit(tokenizer: Tokenizer, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row(), row("1" * 30))
    with pytest.raises(UserError, match=rf"^{path}:2: the prompt has 32 tokens, data.max_prompt_tokens is 20; raise"):
        load(tokenizer, path, max_prompt_tokens=20)


def test_dropping_every_prompt_is_an_error(tokenizer: Tokenizer, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row(), row())
    with pytest.raises(UserError, match=r"data.train: all 2 prompts are longer than data.max_prompt_tokens 3"):
        load(tokenizer, path, max_prompt_tokens=3, overlong_prompts="drop")


def test_an_empty_file_is_an_error(tokenizer: Tokenizer, tmp_path: Path):
    with pytest.raises(UserError, match=r"data.train: holds no prompts"):
        load(tokenizer, write(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    "prompt",
    [[], ["1+2="], [{"content": "1+2="}], [{"role": "user"}], 5, [{"role": "user", "content": ["image"]}]],
    ids=repr,
)
def test_a_prompt_of_another_form_is_shown(tokenizer: Tokenizer, tmp_path: Path, prompt: Any):
    with pytest.raises(UserError, match=r"a\.jsonl:1: column 'prompt' is .*; write it as \[\{"):
        load(tokenizer, write(tmp_path / "a.jsonl", row(prompt=prompt)))


def test_a_missing_ground_truth_is_shown(tokenizer: Tokenizer, tmp_path: Path):
    with pytest.raises(UserError, match=r"a\.jsonl:1: column 'reward_model' is \{'style': 'rule'\}"):
        load(tokenizer, write(tmp_path / "a.jsonl", row(reward_model={"style": "rule"})))


def test_absent_and_foreign_files_name_the_key(tokenizer: Tokenizer, tmp_path: Path):
    with pytest.raises(UserError, match=r"^data.train.1: no such file '.*b.jsonl'"):
        load(tokenizer, write(tmp_path / "a.jsonl", row()), tmp_path / "b.jsonl")
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(UserError, match=r"a.csv' is neither .jsonl nor .parquet"):
        load(tokenizer, tmp_path / "a.csv")


def numbered(folder: Path, name: str, count: int) -> Path:
    """A file whose rows tell file and place in their ground truth."""
    return write(folder / name, *[row(reward_model={"ground_truth": f"{name}:{i}"}) for i in range(count)])


def truths(prompts: PromptSet, cursor: int, count: int, seed: int = 1) -> list[str]:
    return [prompt.ground_truth for prompt in prompts.take(cursor, count, seed)[0]]


def test_weighted_files_are_mixed_in_proportion_each_passed_through_in_its_own_order(
    tokenizer: Tokenizer, tmp_path: Path
):
    a, b = numbered(tmp_path, "a.jsonl", 5), numbered(tmp_path, "b.jsonl", 7)
    prompts = load(tokenizer, {"path": str(a), "weight": 0.75}, {"path": str(b), "weight": 0.25})
    taken = truths(prompts, 0, 4 * 35)
    for start in range(0, len(taken), 4):
        assert sum(truth.startswith("a.") for truth in taken[start : start + 4]) == 3
    for name, size in (("a.jsonl", 5), ("b.jsonl", 7)):
        own = [truth for truth in taken if truth.startswith(name)]
        passes = [own[i : i + size] for i in range(0, len(own), size)]
        assert all(sorted(one) == sorted(f"{name}:{i}" for i in range(size)) for one in passes)
        assert len({tuple(one) for one in passes}) > 1
    assert truths(prompts, 17, 60) == taken[17:77]
    assert truths(prompts, 0, 140, seed=2) != taken


def test_files_of_one_size_are_not_in_the_same_order(tokenizer: Tokenizer, tmp_path: Path):
    files = [{"path": str(numbered(tmp_path, name, 20)), "weight": 1} for name in ("a.jsonl", "b.jsonl")]
    taken = truths(load(tokenizer, *files), 0, 40)
    orders = [[t.partition(":")[2] for t in taken if t.startswith(name)] for name in ("a.", "b.")]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_a_weighted_file_without_prompts_left_is_named(tokenizer: Tokenizer, tmp_path: Path):
    long = write(tmp_path / "long.jsonl", row("1" * 30))
    files = [{"path": str(write(tmp_path / "a.jsonl", row())), "weight": 1}, {"path": str(long), "weight": 1}]
    with pytest.raises(UserError, match=r"data.train: '.*long.jsonl' has a weight, but none of its prompts remain"):
        load(tokenizer, *files, max_prompt_tokens=20, overlong_prompts="drop")


def test_the_digest_tells_of_all_that_changes_what_a_cursor_means(tokenizer: Tokenizer, tmp_path: Path):
    a, b = write(tmp_path / "a.jsonl", row("1+2="), row("2+2=")), write(tmp_path / "b.jsonl", row("3+3="))
    weighted = [{"path": str(a), "weight": 1}, {"path": str(b), "weight": 1}]
    digests = [
        load(tokenizer, a, b).digest,
        load(tokenizer, b, a).digest,
        load(tokenizer, a).digest,
        load(tokenizer, a, b, shuffle=False).digest,
        load(tokenizer, *weighted).digest,
        load(tokenizer, {"path": str(a), "weight": 2}, weighted[1]).digest,
    ]
    assert len(set(digests)) == len(digests)
    rows, tokens = list(load(tokenizer, a).prompts), np.arange(5)
    cuts = [PromptSet(Prompts(rows, tokens, np.array([0, cut, 5])), 0, (range(2),)).digest for cut in (2, 3)]
    assert cuts[0] != cuts[1]
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(a.read_bytes())
    assert load(tokenizer, moved, b).digest == digests[0]


def is_even(row: dict[str, Any]) -> bool:
    return int(row["reward_model"]["ground_truth"]) % 2 == 0


def test_the_users_filter_sees_whole_rows_of_training_files(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = write(tmp_path / "a.jsonl", *[row(reward_model={"ground_truth": str(i)}) for i in range(5)])
    own = f"{__name__}:is_even"
    assert [p.prompt_id for p in load(tokenizer, path, filter=own).prompts] == [0, 2, 4]
    assert f"data.train: 2 of 5 prompts excluded by {own}" in caplog.text
    section = DataSection.model_validate({"validation": [path], "filter": own})
    assert len(PromptSet.load(PromptFiles(section.validation, "data.validation"), section, tokenizer)) == 5


def test_a_filter_that_fails_names_the_row(tokenizer: Tokenizer, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row(), row(reward_model={"ground_truth": "x"}))
    with pytest.raises(UserError, match=rf"^data.filter at {path}:2: raised ValueError: invalid literal"):
        load(tokenizer, path, filter=f"{__name__}:is_even")


def test_a_filter_that_leaves_nothing_is_reported(tokenizer: Tokenizer, tmp_path: Path):
    with pytest.raises(UserError, match=r"data.filter: .*is_even accepts none of 1 prompts"):
        load(tokenizer, write(tmp_path / "a.jsonl", row()), filter=f"{__name__}:is_even")


def test_short_prompts_are_dropped(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "a.jsonl", row("1"), row("1+2="))
    assert [p.prompt_id for p in load(tokenizer, path, min_prompt_tokens=4).prompts] == [1]
    assert "1 of 2 prompts dropped, shorter than data.min_prompt_tokens 4" in caplog.text


def test_overlong_prompts_are_cut_at_their_left(tokenizer: Tokenizer, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row("123456789"))
    (prompt,) = load(tokenizer, path, max_prompt_tokens=4, overlong_prompts="truncate_left").prompts
    assert tokenizer.decode(prompt.tokens, special=True) == "789<|assistant|>"


def test_named_sets_are_cut_one_by_one(tokenizer: Tokenizer, tmp_path: Path):
    files = [
        {"path": str(numbered(tmp_path, "a.jsonl", 2)), "name": "easy"},
        numbered(tmp_path, "b.jsonl", 3),
        {"path": str(numbered(tmp_path, "c.jsonl", 2)), "name": "easy"},
    ]
    selected = [(name, prompt.ground_truth) for name, prompt in load(tokenizer, *files).first(3)]
    assert selected == [
        *(("easy", f"a.jsonl:{i}") for i in range(2)),
        *(("", f"b.jsonl:{i}") for i in range(3)),
        ("easy", "c.jsonl:0"),
    ]
    assert len(load(tokenizer, *files).first(None)) == 7


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_ranks_that_tokenize_a_part_each_have_the_same_prompts(tokenizer: Tokenizer, tmp_path: Path, count: int):
    path = write(tmp_path / "a.jsonl", *[row("1" * size) for size in (3, 1, 30, 2, 5)])
    section = DataSection.model_validate({"train": [path], "max_prompt_tokens": 20, "overlong_prompts": "drop"})
    source = PromptFiles(section.train, "data.train")

    parts: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def read(rank: int) -> PromptSet:
        def gather(part: Any) -> list[Any]:
            parts[rank] = part
            barrier.wait(timeout=PATIENCE)
            return parts

        return PromptSet.load(source, section, tokenizer, readers=Readers(rank, count, gather))

    with ThreadPoolExecutor(count) as ranks:
        everyone = list(ranks.map(read, range(count)))
    alone = PromptSet.load(source, section, tokenizer)
    assert [prompt.prompt_id for prompt in alone.prompts] == [0, 1, 3, 4]
    for prompts in everyone:
        assert list(prompts.prompts) == list(alone.prompts)
        assert prompts.digest == alone.digest


def test_ranks_that_find_other_prompts_are_refused(tokenizer: Tokenizer, tmp_path: Path):
    """As with files that differ between nodes, or a filter that asks for more than the row."""
    section = DataSection.model_validate({"train": [write(tmp_path / "a.jsonl", row(), row("3+4="))]})

    def gather(part: Any) -> list[Any]:
        return [part, (1, *part[1:])]

    with pytest.raises(UserError, match=r"^data.train: some ranks found 1 prompts in it, others 2; give all nodes"):
        PromptSet.load(PromptFiles(section.train, "data.train"), section, tokenizer, readers=Readers(0, 2, gather))


def test_a_prompt_that_ends_with_an_answer_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    ended = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    path = write(tmp_path / "a.jsonl", row(prompt=ended))
    with pytest.raises(UserError, match=r"a\.jsonl:1: column 'prompt' ends with an assistant message"):
        load(tokenizer, path)


def test_a_row_may_bring_its_own_tools(tokenizer: Tokenizer, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row(), row(tools="[{]"))
    with pytest.raises(UserError, match=r"a\.jsonl:2: column 'tools' is '\[\{\]'; write a list of JSON schemas"):
        load(tokenizer, path)
    path = write(tmp_path / "a.jsonl", row(tools=json.dumps([{"name": "add"}])))
    with pytest.raises(UserError, match="the chat template does not render tools"):
        load(tokenizer, path)


def test_a_damaged_parquet_file_is_named(tokenizer: Tokenizer, tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read"):
        load(tokenizer, tmp_path / "a.parquet")
