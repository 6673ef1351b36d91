"""Which interface of a node leads to the other nodes, on networks made of namespaces."""

from __future__ import annotations

import pytest

from rlhpc.launch.worker.node_check import interface_address, network_interface
from tests.launch.worker.made_nodes import needs_root, on_node

NETWORK = """
cat > /tmp/hosts << END
127.0.0.1 localhost
10.1.0.9 master-on-eth
10.2.0.9 master-on-ib
10.2.0.1 node1
127.0.1.1 loopback
END
mount --bind /tmp/hosts /etc/hosts
cable() { ip link add $1 type veth peer name $1-; ip addr add $2 dev $1; ip link set $1 up; ip link set $1- up; }
cable eth0 10.1.0.1/24
"""


SECOND = "cable ib0 10.2.0.1/24\n"


ROUTE = "ip route add default via 10.1.0.254\n"


@pytest.mark.heavy
@needs_root
@pytest.mark.parametrize(
    ("setup", "master", "interface"),
    [
        (NETWORK + SECOND, "master-on-eth", "eth0"),
        (NETWORK + SECOND, "master-on-ib", "ib0"),
        (NETWORK + SECOND, "node1", "ib0"),  # this node is the master
        (NETWORK + SECOND + ROUTE, "loopback", "eth0"),  # a master that has itself as 127.0.1.1
        (NETWORK, "loopback", "eth0"),
        (NETWORK + "ip addr add 10.2.0.7/24 dev eth0", "master-on-ib", "eth0"),  # a second address
        (NETWORK + "ip addr add 10.2.0.7/24 dev eth0 label eth0:1", "master-on-ib", "eth0"),
    ],
)
def test_the_interface_that_leads_to_the_master(setup, master, interface):
    assert on_node(setup, f"network_interface({master!r})", name="node1").result == interface


@needs_root
def test_an_interface_that_cannot_be_determined():
    found = on_node(NETWORK + SECOND, "network_interface('loopback')", name="node1")
    assert found.error == (
        "node node1: cannot determine which of its interfaces (eth0, ib0) leads to the other nodes: 'loopback' is"
        " 127.0.1.1 here; name it in slurm.interface"
    )


@needs_root
def test_the_address_of_an_interface():
    setup = NETWORK + SECOND + "ip addr add 10.1.0.2/24 dev eth0; ip addr add 10.2.0.2/24 dev ib0 label ib0:1"
    found = on_node(setup, "[interface_address(name) for name in ('eth0', 'ib0', 'lo', 'eth1')]")
    assert found.result == ["10.1.0.1", "10.2.0.1", "127.0.0.1", None]


def test_a_single_node_needs_no_network():
    assert interface_address("lo") == "127.0.0.1"
    assert network_interface("no-such.invalid", single_node=True) == "lo"
