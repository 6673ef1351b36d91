"""``rlhpc configs``: what is listed, and what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhpc.cli.setup import configs
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.models import read_model

SHIPPED = Path(__file__).parents[2] / "rlhpc"


def printed(*arguments: str) -> str:
    return CliRunner().invoke(configs, arguments, catch_exceptions=False).output


def test_every_shipped_file_is_listed_once_with_a_line() -> None:
    rows = [line.split(maxsplit=1) for line in printed().splitlines()]
    files = [*SHIPPED.glob("configs/**/*.yaml"), *SHIPPED.glob("sbatch/*")]
    assert sorted(name for name, _ in rows) == sorted(file.name.removesuffix(".yaml") for file in files)
    assert [name for name, _ in rows[:3]] == ["demo", "site", "slurm_demo"]
    assert not [title for _, title in rows if len(title) > 100 or title.startswith("#")]


def test_a_printed_config_works_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text := printed("qwen2.5-7b-1node"))
    assert text.startswith(f"# yaml-language-server: $schema={SHIPPED}/configs/schema.json\n")
    assert read_model(load_config(Path("my.yaml")).model.path).num_layers == 28


def test_a_job_script_is_printed_as_it_is() -> None:
    assert printed("grpo.sbatch") == (SHIPPED / "sbatch" / "grpo.sbatch").read_text()


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"^dap: no shipped config or job script .*; did you mean 'dapo'\?"):
        printed("dap")
