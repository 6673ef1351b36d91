"""The ranks' environment on this machine, and what one machine cannot start."""

from __future__ import annotations

import os
import socket

import pytest

from rlhpc.config.schema import RunConfig, SlurmSection
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.launch import machine
from tests.helpers.configs import least_config
from tests.helpers.machine import have_gpus, lack_packages


def test_cores_are_shared_evenly_and_never_less_than_one():
    cores = len(os.sched_getaffinity(0))
    assert machine.rank_environment(least_config())[env.OMP_NUM_THREADS] == str(cores)
    many = {"ranks_per_node": 10 * cores}
    assert machine.rank_environment(least_config(resources=many))[env.OMP_NUM_THREADS] == "1"
    assert machine.rank_environment(least_config(resources={"threads_per_rank": 7}))[env.OMP_NUM_THREADS] == "7"


def test_the_compiler_is_off_only_where_there_is_no_gpu(tmp_path, monkeypatch):
    have_gpus(monkeypatch, tmp_path, 0)
    settings = machine.rank_environment(least_config())
    assert settings[env.TORCHDYNAMO_DISABLE] == "1"
    have_gpus(monkeypatch, tmp_path, 1)
    settings = machine.rank_environment(least_config())
    assert env.TORCHDYNAMO_DISABLE not in settings
    assert settings[env.CUDA_DEVICE_MAX_CONNECTIONS] == "1"


def test_fsdp_overlaps_on_gpus_and_compiles_blocks_on_a_cpu(tmp_path, monkeypatch):
    config = least_config(train={"steps": 1, "backend": "fsdp", "compile": "blocks"})
    have_gpus(monkeypatch, tmp_path, 0)
    assert machine.rank_environment(config)[env.TORCHDYNAMO_DISABLE] == "0"
    have_gpus(monkeypatch, tmp_path, 1)
    assert machine.rank_environment(config)[env.CUDA_DEVICE_MAX_CONNECTIONS] == "8"


@pytest.mark.parametrize(("backend", "missing"), [("megatron", ["megatron"]), ("fsdp", [])])
def test_a_run_needs_the_packages_of_its_back_end_alone(backend, missing, monkeypatch):
    lack_packages(monkeypatch, "megatron")
    assert machine.missing_packages(least_config(train={"steps": 1, "backend": backend})) == missing


def test_hidden_gpus_do_not_count(tmp_path, monkeypatch):
    have_gpus(monkeypatch, tmp_path, 2)
    assert machine.gpu_count() == 2
    monkeypatch.setenv(env.CUDA_VISIBLE_DEVICES, "")
    assert machine.gpu_count() == 0


def test_more_ranks_than_gpus_are_refused(tmp_path, monkeypatch):
    have_gpus(monkeypatch, tmp_path, 2)

    def config(ranks: int) -> RunConfig:
        return least_config(resources={"ranks_per_node": ranks})

    with pytest.raises(UserError, match=r"^resources\.ranks_per_node: 4 ranks on 2 GPU"):
        machine.check_resources(config(4))
    machine.check_resources(config(2))
    over_nodes = config(2).model_copy(update={"slurm": SlurmSection(nodes=2)})
    with pytest.raises(UserError, match=r"^slurm\.nodes: .* this machine only, not on 2 nodes"):
        machine.check_resources(over_nodes)


def test_a_free_port_can_be_listened_on():
    port = machine.free_port()
    assert 20000 <= port < 30000
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
