"""What the pages say of files, keys and commands is so."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.main import cli
from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.config.study import StudyFile, load_study
from rlhpc.core.folder import RunFolder
from tests.docs.pages import DOCS, PAGES, ROOT, anchors, blocks, name_of, prose
from tests.test_layers import LAYER_OF
from tests.tiers.durations import read_table
from tools import config_table, markers
from tools.peer_keys import PEERS

# A link or a picture, not one to another site.
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
_SMALLEST_STUDY = {"name": "x", "base": "my.yaml", "space": {"seed": {"choices": [1, 2]}}, "budget": {"trials": 1}}
_SMALLEST: dict[str, Any] = {"name": "x", "model": {"path": "m"}, "train": {"steps": 1}}
_DEMO = ROOT / "configs" / "demo.yaml"

# `slurm.nodes`, also `slurm.nodes: [2, 4]`; not a file such as slurm.conf or data/x.jsonl.
_SECTIONS = "|".join(name for name, field in RunConfig.model_fields.items() if "Section" in str(field.annotation))
_KEY = re.compile(rf"`({_SECTIONS})((?:\[\]|\.\d+)?\.(?!conf\b|md\b|py\b)[a-z][\w.]*)")

YAML = [pytest.param(text, id=f"{name_of(page)}-{i}") for page in PAGES for i, text in enumerate(blocks(page, "yaml"))]
COMMANDS = [
    pytest.param(line, id=f"{name_of(page)}: {line}")
    for page in PAGES
    for text in blocks(page, "sh")
    for line in text.splitlines()
    if line.startswith("rlhpc ")
]


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page's text whose file, or whose heading in it, is not there."""
    broken = []
    for file, heading in _LINK.findall(text):
        target = page.parent / file if file else page
        if not target.exists() or (heading and heading not in anchors(target)):
            broken.append(f"{file}#{heading}" if heading else file)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, prose(page))


def test_a_broken_link_is_seen() -> None:
    text = "[a](data.md) [b](dta.md) [c](data.md#no-such) [d](https://example.org/x) ![e](images/none.png)"
    assert broken_links(DOCS / "metrics.md", text) == ["dta.md", "data.md#no-such", "images/none.png"]


@cache
def known_keys() -> frozenset[str]:
    """Keys of the configuration, and their sections."""
    keys = {key for key, _ in config_table.keys(RunConfig.model_json_schema())}
    keys |= {f"site.efficiency.{name}" for name in EfficiencySection.model_fields}
    return frozenset(keys | {key.rpartition(".")[0] for key in keys})


def unknown_keys(text: str) -> list[str]:
    """Keys in a page's code words that the configuration does not have."""
    known = known_keys()
    free = (
        "rewards.0.arguments.",
        "train.dynamic_sampling.arguments.",
        "actor.optimizer.arguments.",
        "slurm.sbatch_options.",
        "prepare.arguments.",
        "rollout.engine.",
    )  # their names are the user's
    named = [re.sub(r"\.\d+\.", "[].", f"{section}{key.rstrip('.')}") for section, key in _KEY.findall(text)]
    return [key for key in named if key not in known and not key.startswith(free)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_in_the_pages_exist(page: Path) -> None:
    ours = {"coming_from.md": 1, "configuration.md": 3}  # columns; those after them name keys of other frameworks
    text = prose(page)
    if page.name in ours:
        text = re.sub(rf"^((\|([^|\n]|\\\|)*){{{ours[page.name]}}}).*$", r"\1", text, flags=re.M)
    assert not unknown_keys(text)


def test_a_key_that_is_not_there_is_seen() -> None:
    text = "`slurm.nodes: [2, 4]`, `recovery.tries`, `slurm.container.image`, `slurm.conf`, `slurm.sbatch_options.x`"
    assert unknown_keys(text + " `slurm.timeout=3`") == ["recovery.tries", "slurm.timeout"]


@pytest.mark.parametrize("text", YAML)
def test_configurations_in_the_pages_load(text: str, tmp_path: Path) -> None:
    """A whole one as it is, a part of one laid over the smallest; studies too."""
    data = yaml12.parse(text, "page") or {}
    file = tmp_path / "config.yaml"
    if data and data.keys() <= StudyFile.model_fields.keys():
        file.write_text(yaml12.dump({**_SMALLEST_STUDY, **data}))
        load_study(file)
        return
    file.write_text(text if "name" in data else yaml12.dump({**_SMALLEST, **data}))
    load_config(file)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_in_the_pages_are_ones(line: str) -> None:
    """Options are known to the command line, overrides to the schema."""
    name, *arguments = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    parameters = cli.commands[name].make_context(name, arguments).params
    words = parameters.get("overrides", ())
    config = ROOT / parameters.get("config", "")
    load_config(config if config.is_file() else _DEMO, [word for word in words if "=" in word])


@pytest.mark.parametrize(("page", "file"), [("rewards", "my_reward"), ("tools", "my_tool")])
def test_a_page_shows_its_example_file(page: str, file: str) -> None:
    assert (DOCS / "examples" / f"{file}.py").read_text() in blocks(DOCS / f"{page}.md", "python")


def test_pages_link_every_example() -> None:
    links = {file for page in DOCS.glob("*.md") for file, _ in _LINK.findall(page.read_text())}
    assert {f"examples/{file.name}" for file in (DOCS / "examples").glob("*.py")} <= links


def test_the_table_of_keys_is_current() -> None:
    page = markers.between(config_table.PAGE, config_table.MARKER)
    assert page == config_table.table(), "run `python -m tools.config_table`"
    page = markers.between(config_table.SITE_PAGE, config_table.SITE_MARKER)
    assert page == config_table.site_table(), "run `python -m tools.config_table`"


def test_peers_names_are_those_of_keys() -> None:
    """A key that is renamed keeps its place in tools/peer_keys.py."""
    assert not PEERS.keys() - {key for key, _ in config_table.keys(RunConfig.model_json_schema())}
    assert all(any(names) for names in PEERS.values())
    assert ", TRL `learning_rate` |" in config_table.table()


def test_defaults_beside_the_peers_are_the_schema_s() -> None:
    """The second column of the table in coming_from.md."""
    table = (DOCS / "coming_from.md").read_text().partition("## Which defaults differ?")[2]
    shown = dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|", table, re.M))
    fields = dict(config_table.keys(RunConfig.model_json_schema()))
    assert len(shown) > 15
    assert shown == {key: config_table.default(fields[key]) for key in shown}


def absent_files(text: str) -> list[str]:
    """Python files that a text names and the project does not have."""
    named = re.findall(r"`([\w/]+\.py)`", text)
    return [name for name in named if not (ROOT / name).is_file() and not any((ROOT / "rlhpc").rglob(name))]


def test_files_in_the_architecture_exist() -> None:
    assert not absent_files((DOCS / "architecture.md").read_text())
    assert absent_files("`trainer/step.py`, `queue.py`, `trainer/stp.py`") == ["trainer/stp.py"]


def test_every_section_is_introduced() -> None:
    text = (DOCS / "configuration.md").read_text()
    introduced = set(re.findall(r"`(\w+)`", text.partition("## Sections")[2].partition("\n## ")[0]))
    assert {name for name in RunConfig.model_fields if name not in introduced} == {"name", "run_dir", "seed"}


def test_the_readme_names_every_page_and_the_list_of_measurements_each_of_them() -> None:
    def named(page: Path) -> set[Path]:
        return {(page.parent / file).resolve() for file, _ in _LINK.findall(page.read_text()) if file.endswith(".md")}

    measurements = DOCS / "measurements" / "README.md"
    assert {*DOCS.glob("*.md"), measurements} <= named(ROOT / "README.md")
    assert set(measurements.parent.glob("*.md")) - {measurements} <= named(measurements)


def test_each_page_asks_a_question() -> None:
    titles = {page.name: page.read_text().splitlines()[0] for page in DOCS.glob("*.md")}
    titles.pop("architecture.md")  # for those who change the code
    assert all(title.startswith("# ") and title.endswith("?") for title in titles.values()), titles


CAPABILITIES = DOCS / "capabilities.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in CAPABILITIES.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| .*`tests/", line)
]


def test_the_page_has_rows_for_every_command() -> None:
    used = {words[0] for _, command, _, _ in ROWS if (words := command.strip("`").split())[0] != "python"}
    assert used == cli.commands.keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_command_page_and_test_are_there(row: list[str]) -> None:
    _, command, page, test = row
    words = command.strip("`").split()
    if words[0] == "python":
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert words[0] in cli.commands
    assert (DOCS / re.fullmatch(r"\[.*\]\((.*)\)", page)[1]).is_file()
    file, _, name = test.strip("`").partition("::")
    functions = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in {function.name for function in functions}


def test_the_tests_run_in_make_test() -> None:
    functions = {row.function for row in read_table() if row.tier in ("check", "test")}
    assert {test.strip("`") for _, _, _, test in ROWS} <= functions


RUN_FOLDER = DOCS / "run_folder.md"
RUN = Path("/run")


def rows() -> dict[str, str]:
    """For each file or folder of the page, what bounds its size."""
    found = {}
    for line in RUN_FOLDER.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, contents, size = (cell.strip() for cell in line.strip("|").split("|"))
            found |= {name.rstrip("/"): size for name in re.findall(r"`([^`]+)`", names)}
            found |= dict.fromkeys(re.findall(r"`(\w+\.json)`", contents), size)
    return found


def written() -> set[str]:
    """The first folder, or the file, of each path that RunFolder names."""
    folder = RunFolder(RUN)
    named = [getattr(folder, name) for name, kind in vars(RunFolder).items() if isinstance(kind, property)]
    paths = [one if isinstance(one, Path) else one.path for one in named]  # a folder's own paths are inside it
    found = {path.relative_to(RUN).parts[0] for path in paths}
    return found - {"attempts"}


@pytest.mark.parametrize("name", sorted(written()))
def test_what_a_run_writes_has_a_row_with_its_bound(name: str) -> None:
    assert rows().get(name), f"docs/run_folder.md has no row for {name}"


def test_every_row_is_of_something_that_is_written() -> None:
    names = {name.partition("/")[0] for name in rows()} - {"attempts"}
    assert names <= written()
    assert len(names) > 12


def test_the_picture_has_every_room_below_those_that_import_it() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    picture = page[page.index("```text") : page.index("```\n\n`launch`")]
    rows = [re.findall(r"[a-z_.0-9]+", line[:46]) for line in picture.splitlines()[1:]]
    drawn = [(number, room) for number, names in enumerate(rows) for room in names if room in LAYER_OF]
    assert sorted(room for _, room in drawn) == sorted(LAYER_OF)
    layers = [LAYER_OF[room] for _, room in drawn]
    assert layers == sorted(layers, reverse=True)
