"""Reading prompt files, and taking prompts from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.schema import DataSection
from rlhpc.core.errors import UserError
from rlhpc.data.prompts import PromptSet
from rlhpc.data.tokenizer import Tokenizer


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


def load(tokenizer: Tokenizer, *paths: Path, **section: Any) -> PromptSet:
    return PromptSet.load(list(paths), DataSection(**section), tokenizer, "data.train")


def test_a_row_becomes_a_prompt(tokenizer: Tokenizer, tmp_path: Path):
    (prompt,) = load(tokenizer, write(tmp_path / "a.jsonl", row())).prompts
    assert (prompt.prompt_id, prompt.data_source, prompt.ground_truth) == (0, "sums", "3")
    assert prompt.extra_info == {"index": 7}
    assert tokenizer.decode(prompt.tokens, special=True) == "<|user|>1+2=<|assistant|>"


def test_parquet_and_jsonl_give_the_same_prompts(tokenizer: Tokenizer, tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    rows = [row("1+2="), row("2+2=", ability="maths")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = load(tokenizer, write(tmp_path / "a.jsonl", *rows))
    assert load(tokenizer, tmp_path / "a.parquet").prompts == lines.prompts


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
    import pyarrow
    from pyarrow import parquet

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


@pytest.mark.parametrize("prompt", [[], [{"role": "user"}], 5, [{"role": "user", "content": ["image"]}]])
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


def test_a_damaged_parquet_file_is_named(tokenizer: Tokenizer, tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read"):
        load(tokenizer, tmp_path / "a.parquet")
