"""What tools/words.txt lists is reported with its line and replacement, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import words

WORDS = words.read()


def found(root: Path, **texts: str) -> list[str]:
    """The findings of files with these texts; ``a__b_py`` is a/b.py."""
    files = []
    for name, text in texts.items():
        files.append(name.replace("__", "/")[::-1].replace("_", ".", 1)[::-1])
        (root / files[-1]).parent.mkdir(parents=True, exist_ok=True)
        (root / files[-1]).write_text(text)
    return [str(each) for each in words.check(root, files, WORDS)]


def test_a_phrase_is_reported_with_its_line_and_replacement(tmp_path: Path) -> None:
    text = "# The requests\n# that are Under\n# way when a rank is retold of it, likeliest.\n"
    assert found(tmp_path, a_py=text) == [
        f'a.py:2: "Under way" -> {WORDS.phrases["under way"]}',
        f'a.py:3: "likeliest" -> {WORDS.phrases["likeliest"]}',
    ]


def test_a_name_is_reported_where_it_is_whole(tmp_path: Path) -> None:
    text = "weights_version = new_weights_version(version)\nmetrics['validation/accuracy']\n"
    assert found(tmp_path, a_py=text) == [
        'a.py:1: "weights_version" -> policy_version',
        'a.py:2: "validation/accuracy" -> validation/reward_mean',
    ]


def test_a_plain_word_is_a_name_only_in_code(tmp_path: Path) -> None:
    """``push`` is English in prose and in a comment; as a name, a code word or a key it is the old word."""
    expected = WORDS.names["push"]
    assert found(tmp_path, a_py="# push it\nengine.push(1)\nx = 'push it'\n") == [f'a.py:2: "push" -> {expected}']
    assert found(tmp_path, a_md="Push, or push.\n`push` is a phase\n") == [f'a.md:2: "push" -> {expected}']
    assert found(tmp_path, a_yaml="# push\npush: 1\n") == [f'a.yaml:2: "push" -> {expected}']


@pytest.mark.parametrize("file", ["tests__golden__a_txt", "docs__measurements__a_md"])
def test_an_allowed_file_is_not_checked(tmp_path: Path, file: str) -> None:
    assert found(tmp_path, **{file: "told = 1\n"}) == []
    assert found(tmp_path, other_py="told = 1\n") == [f'other.py:1: "told" -> {WORDS.phrases["told"]}']


def test_english_that_contains_a_phrase_is_fine(tmp_path: Path) -> None:
    assert found(tmp_path, a_md="A page stands in for another; what stands in it?\n") == [
        f'a.md:1: "stands in" -> {WORDS.phrases["stands in"]}'
    ]


def test_an_entry_without_a_replacement_is_refused(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("[phrases]\ntold\n")
    with pytest.raises(AssertionError, match="'told' has neither a replacement nor a reason"):
        words.read(tmp_path / "words.txt")


def test_a_docstring_begins_with_a_noun_or_a_verb(tmp_path: Path) -> None:
    text = '"""What a run leaves."""\n\n\ndef deal():\n    """Deals."""\n    x = "What"\n'
    assert found(tmp_path, a_py=text) == [
        f'a.py:1: """"What" -> {WORDS.openings["What"]}',
        f'a.py:5: """"Deals." -> {WORDS.openings["Deals."]}',
    ]
    assert found(tmp_path, tests__a_py=text) == []
