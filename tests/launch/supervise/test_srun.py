"""The command line of srun and the environment of the ranks, word by word."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.rank import RankInfo
from rlhpc.launch.runs.logs import rank_logs
from rlhpc.launch.supervise.srun import RankBlock, blocks_of, first_commands, srun_command, srun_environment
from tests.helpers.plain_model import write_inputs

PLAIN = [
    "--distribution=block:block",
    "--kill-on-bad-exit=1",
    "--mpi=none",
    "--overlap",
    "--unbuffered",
    "--open-mode=append",
    "--input=none",
    "--export=ALL",
]
ATTEMPT = AttemptFolder(Path("/runs/a/attempts/0003"))
PROGRAM = ["-u", "-m", "rlhpc.launch.worker.main", "/runs/a/attempts/0003"]
LOG = "--output=/runs/a/attempts/0003/logs/rank-%5t.log"


@pytest.fixture
def config(tmp_path, request) -> RunConfig:
    """Two ranks on each node, with the test's further keys."""
    keys = getattr(request, "param", ())
    return load_config(write_inputs(tmp_path), ["resources.ranks_per_node=2", *keys])


def shape(*nodes: str, ranks: int = 2) -> list[str]:
    total = len(nodes) * ranks
    return [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", f"--ntasks={total}", f"--ntasks-per-node={ranks}"]


def test_one_task_for_each_rank(config) -> None:
    command = srun_command(config, ("node1", "node2"), ATTEMPT)
    assert command == ["srun", *shape("node1", "node2"), *PLAIN, LOG, sys.executable, *PROGRAM]


def test_the_log_is_where_others_look_for_it(tmp_path) -> None:
    attempt = AttemptFolder(tmp_path / "attempts" / "0001")
    attempt.logs.mkdir(parents=True)
    file = attempt.logs / Path(LOG.removeprefix("--output=").replace("%5t", "00012")).name
    file.touch()
    assert rank_logs(attempt) == {12: file}


def test_only_the_nodes_that_the_layout_can_use(config) -> None:
    """The first ones, or those without an excluded one."""
    groups = [("node1", "node2", "node3")]
    command = srun_command(config, ("node1", "node3"), ATTEMPT, "my.module:program", groups)
    assert command == ["srun", *shape("node1", "node3"), *PLAIN, LOG, sys.executable, *PROGRAM, "my.module:program"]


@pytest.mark.parametrize(
    "config",
    [["slurm.cpus_per_rank=12", "slurm.cpu_bind=cores", 'slurm.srun_options=["--gres-flags=allow-task-sharing"]']],
    indirect=True,
)
def test_cores_their_binding_and_options_of_the_user(config) -> None:
    command = srun_command(config, ("node1",), ATTEMPT)
    further = ["--cpus-per-task=12", "--cpu-bind=cores", LOG, "--gres-flags=allow-task-sharing"]
    assert command == ["srun", *shape("node1"), *PLAIN, *further, sys.executable, *PROGRAM]


def test_groups_of_a_heterogeneous_job_are_one_world(config) -> None:
    groups = [("node1",), ("node2", "node3")]
    command = srun_command(config, ("node1", "node2", "node3"), ATTEMPT, "", groups)
    logs = ["bash", "-c", 'exec "$@" >>"$0/rank-$(printf %05d "$SLURM_PROCID").log" 2>&1', str(ATTEMPT.logs)]
    first = ["--het-group=0", *shape("node1"), *PLAIN, *logs, sys.executable, *PROGRAM]
    second = ["--het-group=1", *shape("node2", "node3"), *PLAIN, *logs, sys.executable, *PROGRAM]
    assert command == ["srun", *first, ":", *second]


def test_a_group_whose_nodes_are_all_left_out_is_not_named(config) -> None:
    command = srun_command(config, ("node2",), ATTEMPT, "", [("node1",), ("node2", "node3")])
    assert ":" not in command
    assert command[1:4] == ["--het-group=1", "--nodes=1", "--nodelist=node2"]


# ---- engines that may be lost: steps of their own

REJOIN = [
    "placement=separate",
    "rollout.ranks=3",
    "asynchrony.max_staleness=1",
    "recovery.lost_engines=rejoin",
    "slurm.cpus_per_rank=12",
]
STEPS = ["0-1", "2-2", "3-3", "4-4", "5-5"]  # three ranks train, on two nodes


def test_a_part_of_the_ranks_is_cut_at_nodes() -> None:
    nodes = ["a", "b", "c", "d"]
    assert blocks_of(range(8), nodes, 2) == [RankBlock(range(8), ("a", "b", "c", "d"), 0)]
    assert blocks_of(range(7), nodes, 2, 3) == [
        RankBlock(range(6), ("a", "b", "c"), 0, 3),
        RankBlock(range(6, 7), ("d",), 0, 3),
    ]
    assert blocks_of(range(3, 8), nodes, 2) == [
        RankBlock(range(3, 4), ("b",), 1),
        RankBlock(range(4, 8), ("c", "d"), 0),
    ]
    assert blocks_of(range(5, 6), nodes, 4) == [RankBlock(range(5, 6), ("b",), 1)]


@pytest.mark.parametrize("config", [REJOIN], indirect=True)
def test_each_engine_is_a_step_of_its_own(config) -> None:
    """Ranks that share their node with those of another step are not bound to cores: Slurm may give both the same."""
    commands = first_commands(config, ["node1", "node2", "node3"], ATTEMPT)
    assert [command[1] for command in commands] == [f"--job-name=ranks-{part}" for part in STEPS]
    logs = 'exec "$@" >>"$0/rank-$(printf %05d "{}").log" 2>&1'
    rest = [str(ATTEMPT.logs), sys.executable, *PROGRAM]
    whole = [*shape("node1"), *PLAIN, "--cpus-per-task=12", "bash", "-c", logs.format("$SLURM_PROCID")]
    shared = [*shape("node2", ranks=1), *PLAIN, "--cpu-bind=none", "bash", "-c", logs.format("$((3 + SLURM_PROCID))")]
    assert commands[0][2:] == [*whole, *rest]
    assert commands[2][2:] == [*shared, *rest]


@pytest.mark.parametrize("config", [REJOIN], indirect=True)
def test_a_step_knows_its_place_in_the_job(config) -> None:
    found = srun_environment(config, 6, "node1", (20042, b"\x01"), 20777, RankBlock(range(3, 4), ("node2",), 1, 2))
    rank = RankInfo.from_environ({**found, env.SLURM_PROCID: "0", env.SLURM_LOCALID: "0"})
    assert (rank.rank, rank.world_size, rank.local_rank, rank.generation) == (3, 6, 1, 2)
    assert found[env.RLHPC_RANKS_PER_NODE] == "2"
    assert env.SRUN_CPUS_PER_TASK not in found
    whole = srun_environment(config, 6, "node1", (20042, b"\x01"), 20777, RankBlock(range(4, 6), ("node3",), 0))
    assert whole[env.SRUN_CPUS_PER_TASK] == "12"
    assert env.RLHPC_OWN_CORES in found
    assert env.RLHPC_OWN_CORES not in whole
    unbound = config.model_copy(update={"slurm": config.slurm.model_copy(update={"cpu_bind": "none"})})
    block = RankBlock(range(3, 4), ("node2",), 1, 2)
    assert env.RLHPC_OWN_CORES not in srun_environment(unbound, 6, "node1", (20042, b"\x01"), 20777, block)


# ---- the environment


def environment(config: RunConfig) -> dict[str, str]:
    return srun_environment(config, 4, "node1", (20042, b"\x01\xff"), 20777)


def test_ranks_learn_the_address_of_their_store(config, monkeypatch) -> None:
    monkeypatch.setenv(env.RANK, "7")  # of another launcher
    monkeypatch.setenv("SITE", "kept")
    monkeypatch.setenv(env.SLURM_EXPORT_ENV, "NONE")  # of a job with --export=NONE
    found = environment(config)
    expected = {
        "RLHPC_WORLD_SIZE": "4",
        "RLHPC_STORE": "node1:20042",
        "RLHPC_STORE_SECRET": "01ff",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "20777",
        "HF_HUB_OFFLINE": "1",
        "SITE": "kept",
    }
    assert {name: found[name] for name in expected} == expected
    absent = {env.RANK, env.SLURM_EXPORT_ENV, env.SRUN_CPUS_PER_TASK, env.GLOO_SOCKET_IFNAME, env.NCCL_SOCKET_IFNAME}
    assert not absent & found.keys()


@pytest.mark.parametrize("config", [["slurm.interface=ib0"]], indirect=True)
def test_the_interface_is_of_gloo_and_nccl(config) -> None:
    found = environment(config)
    assert (found[env.GLOO_SOCKET_IFNAME], found[env.NCCL_SOCKET_IFNAME]) == ("ib0", "ib0")
    assert found[env.RLHPC_STORE] == "node1:20042", "the store listens on every interface"


@pytest.mark.parametrize(
    ("config", "threads"),
    [
        ([], "6"),  # the node's twelve cores shared
        (["slurm.cpus_per_rank=4"], "4"),
        (["slurm.cpus_per_rank=4", "resources.threads_per_rank=3"], "3"),
    ],
    indirect=["config"],
)
def test_threads(config, threads, monkeypatch) -> None:
    monkeypatch.setenv(env.SLURM_CPUS_ON_NODE, "12")
    found = environment(config)
    assert found[env.OMP_NUM_THREADS] == threads
    assert found.get(env.SRUN_CPUS_PER_TASK) == ("4" if config.slurm.cpus_per_rank else None)


@pytest.mark.parametrize(
    ("config", "there", "absent"),
    [
        ([], env.CUDA_DEVICE_MAX_CONNECTIONS, env.TORCHDYNAMO_DISABLE),
        (["slurm.gpus_per_node=0"], env.TORCHDYNAMO_DISABLE, env.CUDA_DEVICE_MAX_CONNECTIONS),
    ],
    indirect=["config"],
)
def test_with_and_without_gpus(config, there, absent) -> None:
    found = environment(config)
    assert found[there] == "1"
    assert absent not in found


def test_the_secret_is_in_no_command(config) -> None:
    secret = environment(config)[env.RLHPC_STORE_SECRET]
    assert secret not in " ".join(srun_command(config, ("node1",), ATTEMPT))
