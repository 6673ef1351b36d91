"""A conversion never writes over its source, nor over anything that no conversion wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.convert.execute import convert
from rlhpc.convert.sides import read_record
from rlhpc.convert.target import Partial
from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from tests.convert.helpers import Notes, plan, write_random_model

ROOT = Path(__file__).parents[2]
PIPES = {"capture_output": True, "text": True}
FORCE = pytest.mark.parametrize("force", [False, True], ids=["", "force"])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model in models/source and a converted one in models/converted."""
    monkeypatch.chdir(tmp_path)
    source = write_random_model(tmp_path / "models" / "source")
    convert(plan(source, "megatron"), tmp_path / "models" / "converted", workers=1)
    return tmp_path


def refused(source: Path, target: Path, force: bool, match: str) -> None:
    """The conversion is refused with one line, and nothing has changed on disk."""
    before = contents(Path.cwd())
    made = plan(source, "megatron", tp=2)
    with pytest.raises(UserError, match=match) as caught:
        convert(made, target, workers=1, force=force)
    assert caught.value.where in (str(target.resolve()), str(Partial(target.resolve()).path))
    assert caught.value.remedy
    assert contents(Path.cwd()) == before
    assert not list(Path.cwd().rglob("*.partial/plan.json"))


@pytest.mark.heavy
@FORCE
@pytest.mark.parametrize("source", ["source", "converted"])
@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("models/{}", "is the source"),
        ("models/../models/{}/.", "is the source"),
        ("models/{}/new", "is inside the source"),
        ("models/{}/new/deeper", "is inside the source"),
        ("models", "contains the source"),
        (".", "contains the source"),
    ],
)
def test_the_source_is_refused_by_path(home: Path, source: str, target: str, match: str, force: bool) -> None:
    refused(Path("models", source), Path(target.format(source)), force, match)


@FORCE
@pytest.mark.parametrize("which", ["source", "target"])
@pytest.mark.parametrize(("target", "match"), [("converted", "is"), ("converted/new", "is inside"), ("", "contains")])
def test_the_source_is_refused_through_a_link(home: Path, which: str, target: str, match: str, force: bool) -> None:
    (home / "link").symlink_to(home / "models")
    models = {"source": home / "models", "target": home / "models"}
    models[which] = home / "link"
    refused(models["source"] / "converted", models["target"] / target, force, f"{match} the source")


@FORCE
def test_the_blobs_that_the_source_links_to_are_refused(home: Path, force: bool) -> None:
    """As in HuggingFace's cache: a folder of links into another one, which a conversion wrote."""
    (home / "snapshot" / "release").mkdir(parents=True)
    converted = home / "models" / "converted"
    for file in (file for file in converted.rglob("*") if file.is_file()):
        (home / "snapshot" / file.relative_to(converted)).symlink_to(file)
    refused(home / "snapshot", home / "models" / "converted", force, "a link target of the source")


@FORCE
def test_a_folder_of_a_run_s_checkpoints_is_refused(home: Path, force: bool) -> None:
    checkpoints = home / "run" / "checkpoints"
    for step in (1, 2):
        shutil.copytree(home / "models" / "converted", checkpoints / f"step-0000000{step}" / "actor")
    match = "is inside the source|contains the source|is the source"
    for target in (checkpoints / "step-00000001" / "actor", checkpoints / "new", checkpoints, checkpoints.parent):
        refused(home / "run", target, force, match)


@FORCE
def test_a_source_among_unfinished_files_is_refused(home: Path, force: bool) -> None:
    target = home / "target"
    place = Partial(target).files
    place.parent.mkdir(parents=True)
    (home / "models" / "converted").rename(place)
    refused(place, target, force, "for its unfinished files contains the source")


@pytest.mark.heavy
def test_the_source_is_refused_through_bind_mounts(home: Path) -> None:
    """Equal, inside and above, each from either name, with and without --force, in a mount namespace of its own."""
    code = """
import sys
from pathlib import Path
from tests.convert.test_destination import refused
original, bound = Path("models"), Path("bound")
assert bound.resolve() != original.resolve()
for one, other in ((original, bound), (bound, original)):
    for force in (False, True):
        refused(one / "converted", other / "converted", force, "is the source")
        refused(one / "converted", other / "converted" / "new", force, "is inside the source")
        refused(one / "converted", other, force, "contains the source")
        # Above under another name: no parent of the source's path is this folder.
        refused(Path("alone"), original, force, "no conversion wrote|not written by|already exists")
        # What a conversion wrote, in which the source is mounted.
        refused(Path("alone"), Path("other"), force, "contains 'mounted'|already exists; choose another folder$")
        refused(Path("models/converted"), Path("staged"), force, "for its unfinished files")
        refused(Path("models/source"), Path("disk"), force, "is a mount point, which cannot be replaced; name a new")
print("refused")
"""
    for folder in ("disk", "bound", "alone", "other/mounted", "staged.partial/files"):
        (home / folder).mkdir(parents=True)
    shutil.copytree(home / "models" / "converted", home / "other", dirs_exist_ok=True)
    mounts = (
        ("models", "bound"),
        ("models/converted", "alone"),
        ("models/converted", "other/mounted"),
        ("models/converted", "staged.partial/files"),
    )
    script = " && ".join(["mount -t tmpfs none disk", *(f"mount --bind {one} {other}" for one, other in mounts)])
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{script} && exec "$0" -c "$1"', sys.executable, code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **PIPES,
    )
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("this machine does not permit mounts")
    assert done.stdout == "refused\n", done.stderr


def add_file(target: Path) -> None:
    (target / "notes.txt").write_text("years of work")


def add_folder(target: Path) -> None:
    (target / "data").mkdir()
    (target / "data" / "notes.txt").write_text("years of work")


def replace_by_folder(target: Path) -> None:
    """Under the name of a file that a conversion wrote."""
    (target / "config.json").unlink()
    add_folder(target)
    (target / "data").rename(target / "config.json")


def lose_record(target: Path) -> None:
    (target / "conversion.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (add_file, "contains 'notes.txt', which no conversion wrote; --force replaces only"),
        (add_folder, "contains 'data', which no conversion wrote"),
        (replace_by_folder, "contains 'config.json', which no conversion wrote"),
        (lose_record, "was not written by a conversion"),
    ],
)
def test_force_replaces_only_what_a_conversion_wrote(home: Path, change: Callable[[Path], None], match: str) -> None:
    target = home / "models" / "converted"
    change(target)
    refused(home / "models" / "source", target, True, match)
    refused(home / "models" / "source", target, False, "already exists( and is damaged)?; choose another folder$")


def test_files_in_a_subfolder_are_replaced_and_others_in_it_kept(home: Path) -> None:
    source, target = home / "models" / "source", home / "models" / "new"
    made = plan(source, "megatron")
    assert convert(made, target, workers=1)
    assert "release/__0_0.distcp" in read_record(target)["files"]
    assert not verify(source, target, workers=1).faults
    assert not convert(made, target, workers=1), "made by the same plan: nothing to do"
    assert convert(made, target, workers=1, force=True)
    assert sorted(path.name for path in target.parent.iterdir()) == ["converted", "new", "source"]
    add_file(target / "release")
    refused(source, target, True, "contains 'release/notes.txt', which no conversion wrote")


def test_a_file_is_not_replaced(home: Path) -> None:
    (home / "thesis.tex").write_text("years of work")
    refused(home / "models" / "source", home / "thesis.tex", True, "is not a folder")


def test_a_target_that_changes_meanwhile_is_not_replaced(home: Path) -> None:
    """Somebody else takes the name while the conversion works; the next try goes on from what is finished."""
    source, target = home / "models" / "source", home / "models" / "new"
    made, notes = plan(source, "megatron", tp=2), Notes()

    def take() -> None:
        target.mkdir(exist_ok=True)
        add_file(target)

    for force, match in ((False, "already exists"), (True, "not written by a conversion")):
        with pytest.raises(UserError, match=match):
            convert(made, target, workers=1, force=force, progress=Notes(take))
        assert (target / "notes.txt").read_text() == "years of work"
        (target / "notes.txt").unlink()
    assert convert(made, target, workers=1, progress=notes)
    assert notes.texts == [f"{len(made.outputs)} of {len(made.outputs)} files exist already"]


def stopped(source: Path, target: Path, kind: str = "megatron") -> Partial:
    """Files left by a conversion that finds its target taken at the end."""

    def take() -> None:
        target.mkdir()
        add_file(target)

    with pytest.raises(UserError, match="already exists"):
        convert(plan(source, kind), target, workers=1, progress=Notes(take))
    shutil.rmtree(target)
    return Partial(target)


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_resumed_conversion_writes_through_no_link(home: Path, link: Callable[[Path, Path], None]) -> None:
    """An unfinished file is another name of the source's."""
    source, target = home / "models" / "source", home / "models" / "new"
    before, partial = contents(source), stopped(source, target, "hf")
    (partial.files / "model.safetensors").unlink()
    link(source / "model.safetensors", partial.files / "model.safetensors.part")
    for force in (False, True):
        with pytest.raises(UserError, match=r"'files/model\.safetensors\.part' in it is a link, has a second hard"):
            convert(plan(source, "hf"), target, workers=1, force=force)
    assert contents(source) == before
    shutil.rmtree(partial.path)
    assert convert(plan(source, "hf"), target, workers=1)


def test_files_without_a_record_of_their_chunks_are_written_again(home: Path) -> None:
    source, target, notes = home / "models" / "source", home / "models" / "new", Notes()
    partial = stopped(source, target)
    (partial.path / "chunks" / "__0_0.distcp.json").write_text("[[0, ")
    (partial.files / "release" / "__0_0.distcp").write_bytes(b"unfinished")
    assert convert(plan(source, "megatron"), target, workers=1, progress=notes)
    assert len(notes.texts) == len(plan(source, "megatron").outputs) - 1 == 1
    assert not verify(source, target, workers=1).faults


@pytest.mark.parametrize("folder", [".", "files", "files/release", "chunks", "notes"])
def test_unfinished_files_of_somebody_else_are_not_replaced(home: Path, folder: str) -> None:
    """Also beside those of a conversion of another model, which --force would replace."""
    source, target = home / "models" / "source", home / "models" / "new"
    partial = stopped(source, target)
    theirs = partial.path / folder / "thesis.tex"
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("years of work")
    name = "notes" if folder == "notes" else str(theirs.relative_to(partial.path))
    for made in (plan(source, "megatron"), plan(source, "megatron", tp=2)):
        with pytest.raises(UserError, match=f"'{name}' in it is a link, has a second hard link, or was not written"):
            convert(made, target, workers=1, force=True)
    assert theirs.read_text() == "years of work"


@pytest.mark.parametrize("change", [{"tp": 2}, {"dtype": "bfloat16"}, {"of": "converted"}], ids=str)
def test_unfinished_files_of_another_plan_are_refused_by_name_unless_forced(home: Path, change: dict[str, Any]) -> None:
    source, target = home / "models" / "source", home / "models" / "new"
    partial = stopped(source, target)
    options = {**change}
    made = plan(home / "models" / options.pop("of", "source"), "megatron", **options)
    other = "another source" if change.get("of") else "other options"
    match = f"is an unfinished conversion of {other} .source {source}, target megatron.*start over with --force"
    with pytest.raises(UserError, match=match) as caught:
        convert(made, target, workers=1)
    assert caught.value.where == str(partial.path)
    assert convert(made, target, workers=1, force=True)
    assert not partial.path.exists()
    assert read_record(target)["digest"] == made.digest


def test_hard_links_of_the_source_are_replaced_by_name(home: Path) -> None:
    """A copy by `cp -al` is a conversion's result like any other: its names go, the files stay."""
    source, target = home / "models" / "converted", home / "models" / "copy"
    shutil.copytree(source, target, copy_function=os.link)
    before = contents(source)
    assert convert(plan(source, "megatron", tp=2), target, workers=1, force=True)
    assert contents(source) == before
    assert (target / "conversion.json").read_bytes() != (source / "conversion.json").read_bytes()


def test_a_link_to_a_converted_folder_is_followed(home: Path) -> None:
    """The folder is replaced where it is; the link stays."""
    (home / "link").symlink_to(home / "models" / "converted")
    assert convert(plan(home / "models" / "source", "megatron", tp=2), home / "link", workers=1, force=True)
    assert (home / "link").is_symlink()
    assert not convert(plan(home / "models" / "source", "megatron", tp=2), home / "models" / "converted", workers=1)


def test_a_dry_run_refuses_too(home: Path) -> None:
    command = [sys.executable, "-m", "rlhpc.cli.main", "convert", "hf-to-megatron", "models/source", "models/source"]
    done = subprocess.run([*command, "--dry-run", "--force"], env={**os.environ, "PYTHONPATH": str(ROOT)}, **PIPES)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "is the source" in done.stderr
