"""A whole ``rlhpc run`` around a small rank program: prepare, check, start, the last line."""

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.launch.runs.run import run_here
from tests.helpers.plain_model import write_inputs

pytestmark = pytest.mark.ranks
PROGRAMS = "tests.launch.programs"


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])


def test_inputs_are_prepared_then_the_ranks_run_and_the_last_line_says_where(tmp_path, capsys):
    config = write_inputs(tmp_path)
    later = tmp_path / "later"
    overrides = [
        f"prepare={{function: '{PROGRAMS}:prepare', arguments: {{folder: {later}}}}}",
        f"model.path={later / 'model'}",
        f"data.train.0={later / 'train.jsonl'}",
    ]
    assert run_here(load_config(config, overrides), entry=f"{PROGRAMS}:write_environment") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("rlhpc: finished in ")
    assert last.endswith(f" s: {tmp_path / 'run'}")
    assert load_config(tmp_path / "run" / "config.yaml").model.path == later / "model"


def test_a_failed_run_has_no_last_line(tmp_path, capsys):
    config = load_config(write_inputs(tmp_path), ["resources.ranks_per_node=2"])
    assert run_here(config, entry=f"{PROGRAMS}:killed_rank_one") == 1
    shown = capsys.readouterr()
    assert "finished" not in shown.out
    assert "rank 1 on" in shown.err
    (log,) = (tmp_path / "run" / "attempts" / "0001" / "logs").glob("rank-00001.log")
    assert str(log) in shown.err, "named as docs/recovery.md says"
