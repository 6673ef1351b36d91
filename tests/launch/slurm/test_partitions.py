"""What the cluster has against what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.jobs import memory_mib
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.launch.slurm.job_spec import gpus_per_node
from rlhpc.launch.slurm.partitions import check_partitions, parse_partitions

SINFO = """\
batch*|up|1-00:00:00|8|64|256000|avx512,intel|1-infinite|(null)
gpu|up|2-00:00:00|4|96|512000|a100,ib|1-infinite|gpu:a100:4(S:0-1)
gpu|up|2-00:00:00|2|96+|1024000+|h100,ib|1-infinite|gpu:h100:8(S:0-1),nvme:1
small|up|30:00|20|16|64000|(null)|1-2|gpu:1
old|down|infinite|1|4|8000|(null)|1-infinite|gpu:2
mig|up|infinite|2|64|512000|(null)|1-infinite|gpu:a100:2(S:0-1,3),gpu:a100_1g.5gb:14(S:0),gpu:3g.20gb:2,shard:8
odd|up|infinite|1|64|512000|(null)|1-infinite|gpu:h200:no_consume:4,mps:400
nonsense
"""


@pytest.fixture
def check(tmp_path):
    def run(*overrides: str, ranks: int = 1) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("name: n\nmodel: {path: x}\ntrain: {steps: 1}\n")
        config = load_config(Path(file), [f"resources.ranks_per_node={ranks}", *overrides])
        check_partitions(config, parse_partitions(SINFO), gpus_per_node(config))

    return run


def test_parsing():
    groups = parse_partitions(SINFO)
    assert [group.partition for group in groups] == ["batch", "gpu", "gpu", "small", "old", "mig", "odd"]
    assert (groups[0].default, groups[0].gpus, groups[0].limit) == (True, (), 86400)
    assert groups[1].gpus == (("a100", 4),)
    assert (groups[2].gpus, groups[2].cpus, groups[2].memory_mib) == ((("h100", 8),), 96, 1024000)
    assert (groups[3].gpus, groups[3].limit, groups[3].largest) == ((("", 1),), 1800, 2)
    assert groups[5].gpus == (("a100", 2), ("a100_1g.5gb", 14), ("3g.20gb", 2)), "MIG instances are types of GPUs"
    assert groups[6].gpus == (("h200", 4),)
    assert (groups[4].up, groups[4].limit, groups[4].features) == (False, None, ())


@pytest.mark.parametrize(
    ("text", "mib"), [("480G", 491520), ("100", 100), (100, 100), ("1T", 1048576), ("2048K", 2), ("0", 0)]
)
def test_memory(text, mib):
    assert memory_mib(text) == mib


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["slurm.partition=gpu", "slurm.gpu_type=h100", "slurm.gpus_per_node=8", "slurm.nodes=2"],
        ["slurm.partition=gpu", "slurm.gpus_per_node=4", "slurm.nodes=6"],
        ["slurm.partition=gpu", "slurm.nodes=[1, 50]"],
        ["slurm.partition='batch,gpu'", "slurm.constraint=ib"],
        ["slurm.partition=gpu", "slurm.constraint='a100|h100'"],
        ["slurm.partition=gpu", "slurm.time=9-0", "slurm.qos=long"],
        ["slurm.partition=old", "slurm.time=99-0"],
        ["slurm.partition=gpu", "slurm.memory=0"],
        ["slurm.partition=mig", "slurm.gpu_type=a100_1g.5gb", "slurm.gpus_per_node=14"],
        ["slurm.partition=batch", "slurm.gpu_request=none", "slurm.gpus_per_node=8", "slurm.exclusive=true"],
    ],
)
def test_what_fits_passes(check, overrides):
    check(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slurm.partition=gpus"], "slurm.partition: no partition 'gpus'; did you mean 'gpu'?"),
        (["slurm.partition='gpu,batsch'"], "slurm.partition: no partition 'batsch'; did you mean 'batch'?"),
        (["slurm.partition=batch"], "slurm.gpus_per_node: no node of partition batch has GPUs in Slurm"),
        (
            ["slurm.partition=batch"],
            "name a slurm.partition that has them (gpu, small, old, mig, odd), or, if its nodes",
        ),
        (["slurm.partition=batch"], "without --gpus-per-node: slurm.gpu_request=none and slurm.exclusive=true"),
        (["slurm.partition=mig", "slurm.gpu_type=3g.20gb", "slurm.gpus_per_node=3"], "have at most 2 GPUs"),
        (["slurm.gpus_per_node=99"], "nodes of the cluster have at most 18 GPUs; lower it"),
        (["slurm.partition=gpu", "slurm.gpu_type=v100"], "slurm.gpu_type: no 'v100' GPUs in partition gpu; did you"),
        (["slurm.partition=gpu", "slurm.gpu_type=a100", "slurm.gpus_per_node=8"], "have at most 4 GPUs"),
        (["slurm.partition=gpu", "slurm.gpus_per_node=8", "slurm.nodes=3"], "slurm.nodes: 3 nodes, but partition gpu"),
        (["slurm.partition=small", "slurm.nodes=3"], "use at most 2"),
        (["slurm.partition=gpu", "slurm.time=3-0"], "slurm.time: 3-0 is longer than partition gpu allows; use at most"),
        (["slurm.partition=gpu", "slurm.cpus_per_rank=97"], "slurm.cpus_per_rank: 97 CPUs on each node"),
        (["slurm.partition=gpu", "slurm.memory=2T"], "slurm.memory: 2T of memory on each node, but nodes of"),
        (["slurm.partition=gpu", "slurm.constraint=h200"], "has the feature 'h200'; did you mean 'h100'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(check, overrides, message):
    with pytest.raises(UserError) as caught:
        check(*overrides)
    assert message in str(caught.value)


def test_a_silent_sinfo_refuses_nothing(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("name: n\nmodel: {path: x}\ntrain: {steps: 1}\nslurm: {partition: any, nodes: 99}\n")
    check_partitions(load_config(file), [], 8)
