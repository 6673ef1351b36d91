"""The host name by which ranks find the first node: Slurm's name of it, or that of another network."""

from __future__ import annotations

import socket

from rlhpc.config.jobs import SlurmSection
from rlhpc.core.errors import UserError
from rlhpc.core.rank import node_name

_KEY = "slurm.rendezvous_host"


def rendezvous_host(slurm: SlurmSection) -> str:
    """Host name of this node for the ranks. Raises UserError if slurm.rendezvous_host does not lead to this node."""
    node = node_name()
    if slurm.rendezvous_host is None:
        return node
    host = slurm.rendezvous_host.replace("{node}", node)
    try:
        found = {str(place[4][0]) for place in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)}
    except socket.gaierror as error:
        raise UserError(
            f"node {node} knows no address of {host!r} ({error.strerror})",
            where=_KEY,
            remedy="write the name as in the nodes' /etc/hosts or DNS, {node} in place of the node's name",
        ) from None
    if not any(map(_is_own, found)):
        raise UserError(
            f"{host!r} is {', '.join(sorted(found))}, which is no address of the job's first node {node}",
            where=_KEY,
            remedy="write {node} in place of the node's name, or leave the key out",
        )
    return host


def _is_own(address: str) -> bool:
    """Whether this machine has the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True
