"""Ranks that make a gloo group compare their connections in the job's store."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from rlhpc.parallel.connections import Endpoint
from rlhpc.parallel.store import JobStore

_SHOWN = 3  # strangers in a message


@dataclass(frozen=True)
class Sighting:
    """What a rank saw of its connections in one attempt. ``ports``: where it listens; ``strangers``: far ends of
    accepted connections that no rank opened; ``lost``: number of ranks without their place; ``taken``: number of
    strangers with one."""

    rank: int
    ports: tuple[str, ...]
    strangers: tuple[str, ...] = ()
    lost: int = 0
    taken: int = 0
    error: str = ""
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        return not (self.lost or self.taken or self.error)

    def describe(self) -> str:
        """The strangers, with addresses and ports."""
        count, where = len(self.strangers), ", ".join(self.ports)
        if not count:
            return f"a connection to {where} that no rank of this job opened took the place of a rank, and was closed"
        more = f" and {count - _SHOWN:,} more" if count > _SHOWN else ""
        ends = ", ".join(self.strangers[:_SHOWN]) + more
        met = f"{count:,} connection{'s' * (count > 1)} to {where} that no rank of this job opened, from {ends}"
        places = max(self.lost, self.taken)
        return met + (f"; places of ranks that were taken: {places}" if places else "")


def compare(
    rank: int, ports: Iterable[Endpoint], accepted: Mapping[Endpoint, bool], opened: Iterable[Endpoint]
) -> Sighting:
    """Compares accepted connections, far end: whether it has a rank's place, with those that ranks ``opened`` to us."""
    ours = set(opened)
    strangers = sorted(map(str, set(accepted) - ours))
    lost = sum(not accepted.get(end, False) for end in ours)
    taken = sum(place for end, place in accepted.items() if end not in ours)
    return Sighting(rank, tuple(sorted(map(str, ports))), tuple(strangers), lost, taken)


class Meeting:
    """One attempt of a group's ranks in the job's store, under a ``name`` that no other has."""

    def __init__(self, store: JobStore, name: str, rank: int, size: int) -> None:
        self._store, self._name, self.rank, self.size = store, name, rank, size

    def offer(self, ports: Collection[Endpoint]) -> None:
        """Shows all ranks where this one listens."""
        self._store.set(f"{self._name}/ports {self.rank}", _line([[port.host, port.port] for port in ports]))

    def other_ports(self) -> list[Endpoint]:
        """Where the other ranks listen. Waits until they have all shown it."""
        names = [f"{self._name}/ports {rank}" for rank in range(self.size) if rank != self.rank]
        return [Endpoint(host, port) for ports in self._store.multi_get(names) for host, port in json.loads(ports)]

    def publish(self, opened: Iterable[tuple[Endpoint, Endpoint]]) -> None:
        """Shows listening ranks the connections (near end, far end) that this one has opened to them."""
        claims: dict[str, bytes] = {}
        for near, far in opened:
            claims[self._key(far)] = claims.get(self._key(far), b"") + _line([near.host, near.port])
        if claims:
            self._store.multi_append(claims)

    def opened_to(self, ports: Iterable[Endpoint]) -> set[Endpoint]:
        """Far ends of the connections that ranks have published for our ports so far."""
        keys = [key for key in map(self._key, ports) if self._store.check([key])]
        lines = [line for key in keys for line in self._store.get(key).splitlines()]
        return {Endpoint(host, port) for host, port in map(json.loads, lines)}

    def wait_for_all(self, what: str) -> None:
        """Waits until all ranks have called this."""
        key = f"{self._name}/{what}"
        if self._store.add(f"{key} count", 1) == self.size:
            self._store.set(key, b"all")
        self._store.wait([key])

    def report(self, seen: Sighting) -> None:
        """Shows all ranks what this one has seen."""
        self._store.append(f"{self._name}/sightings", _line(asdict(seen)))

    def sightings(self) -> list[Sighting]:
        """What ranks have reported, by rank."""
        self._store.append(f"{self._name}/sightings", b"")
        found = [json.loads(line) for line in self._store.get(f"{self._name}/sightings").splitlines()]
        read = [
            Sighting(**{**one, "ports": tuple(one["ports"]), "strangers": tuple(one["strangers"])}) for one in found
        ]
        return sorted(read, key=lambda seen: seen.rank)

    def forget(self, ports: Iterable[Endpoint]) -> None:
        """Removes what was published for our ports."""
        for port in ports:
            self._store.delete_key(self._key(port))

    def _key(self, port: Endpoint) -> str:
        return f"{self._name}/to {port}"


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
