"""The host name of the first node, by which ranks find the job's store."""

from __future__ import annotations

import socket

import pytest

from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.launch.supervise.batch_job import rendezvous_host
from tests.helpers.plain_model import write_inputs

NODE = "node7"
ADDRESSES = {"node7": "127.0.0.1", "node7i": "127.0.0.2", "node7x": "198.51.100.7"}


@pytest.fixture
def host_of(tmp_path, monkeypatch):
    """``rendezvous_host`` on a node whose names have the addresses above."""
    monkeypatch.setenv(env.SLURMD_NODENAME, NODE)

    def look_up(host: str, *_: object) -> list:
        if host not in ADDRESSES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ADDRESSES[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    file = write_inputs(tmp_path)
    return lambda *keys: rendezvous_host(load_config(file, keys).slurm)


@pytest.mark.parametrize(
    ("keys", "host"),
    [
        ([], "node7"),
        (["slurm.interface=ib0"], "node7"),
        (['slurm.rendezvous_host="{node}i"'], "node7i"),
        (["slurm.rendezvous_host=node7i"], "node7i"),
    ],
)
def test_the_name_is_slurm_s_or_follows_the_pattern(host_of, keys, host):
    assert host_of(*keys) == host


def test_a_name_without_an_address_is_refused(host_of):
    with pytest.raises(UserError, match=r"^slurm\.rendezvous_host: node node7 knows no address of 'node7-ib' \("):
        host_of('slurm.rendezvous_host="{node}-ib"')


def test_a_name_of_another_machine_is_refused(host_of):
    message = r"'node7x' is 198\.51\.100\.7, which is no address of the job's first node node7; write \{node\} in place"
    with pytest.raises(UserError, match=message):
        host_of("slurm.rendezvous_host=node7x")


def test_a_pattern_with_another_field_is_refused(host_of):
    with pytest.raises(UserError, match=r"slurm\.rendezvous_host"):
        host_of('slurm.rendezvous_host="{host}i"')
