"""Jobs whose environment Slurm does not take from the submitting shell: `--export=NONE`, by option or by variable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.core import env
from tests.helpers.cases import long_but
from tests.slurm.front import Front
from tests.slurm.sbatch_user import CPUS, SbatchUser

pytestmark = pytest.mark.slurm
PROGRAM = "tests.slurm.ranks:note"
VARIABLES = {"SBATCH_EXPORT": "NONE", "SLURM_EXPORT_ENV": "NONE"}
OURS = {"HF_HUB_OFFLINE": "1", "MINE": "set by the config"}


def ranks_of(folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank-1-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("option", "variables"), long_but(("ALL",), [("ALL", VARIABLES), ("NONE", {})]))
def test_ranks_have_the_environment_of_ours(front: Front, option: str, variables: dict[str, str]) -> None:
    keys = ["slurm.gpus_per_node=0", "slurm.nodes=2", "slurm.environment.MINE=set by the config"]
    keys += [f"slurm.sbatch_options.export={option}"] if option != "ALL" else []
    entry = "tests.slurm.jobs:supervise"
    done = front.run("submit", str(front.config), "--entry", entry, *keys, env={**variables, "THEIRS": "of the shell"})
    assert done.returncode == 0, done.stdout + done.stderr
    job = done.stdout.split()[2].rstrip(":")
    front.cluster.wait_state(job, "COMPLETED")
    for rank in ranks_of(front.run_dir):
        environ = rank["environ"]
        assert {name: environ.get(name) for name in OURS} == OURS
        assert environ[env.RLHPC_STORE].partition(":")[0] == "node1"
        assert environ.get("THEIRS") == ("of the shell" if option == "ALL" else None)


@pytest.mark.long
def test_ranks_of_a_plain_script_have_it(cluster, tmp_path) -> None:
    user = SbatchUser(cluster, tmp_path)
    script = tmp_path / "mine.sh"
    path, text = user.environ["PATH"], (Path("sbatch") / "grpo.sbatch").read_text()
    script.write_text(text.replace("\nexec ", f"\nexport PATH={path} PYTHONPATH={user.environ['PYTHONPATH']}\nexec "))
    options = ("--export=NONE", "--nodes=2", "--ntasks-per-node=1", *CPUS)
    user.ended(user.sbatch(*options, script, f"--entry={PROGRAM}", user.config))
    for rank in ranks_of(user.run):
        assert rank["environ"]["HF_HUB_OFFLINE"] == "1"
