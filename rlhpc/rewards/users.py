"""Users as which programs run: never root."""

from __future__ import annotations

import os
from pathlib import Path

from rlhpc.rewards import kernel

INSIDE = 1000  # the program's user, inside its namespace
_NOBODY = 65534


def other_user() -> int:
    """User and group for programs of root: nobody, or the largest id of its namespace; 0 if root is the only one."""
    return min(_NOBODY, _largest_id("uid_map"), _largest_id("gid_map"))


def map_users(process: int) -> None:
    """Maps users into the namespace of ``process``. Root's programs run as nobody: limits do not apply to root."""
    own = (os.geteuid(), os.getegid())
    other = other_user() if own[0] == 0 else 0
    if other:
        maps = [f"0 {one} 1\n{INSIDE} {other} 1" for one in own]
    else:
        maps = [f"{INSIDE} {one} 1" for one in own]
        Path(f"/proc/{process}/setgroups").write_text("deny")
    for name, lines in zip(("uid_map", "gid_map"), maps, strict=True):
        Path(f"/proc/{process}/{name}").write_text(lines)


def program_user() -> int | None:
    """The user that programs of this process become without namespaces; None for its own.

    Raises an OSError for a root that cannot give up what it may do.
    """
    if os.geteuid():
        return None
    other = other_user()
    if other:
        return other
    if _is_root_outside():
        raise PermissionError("root's programs run as nobody, which this user namespace does not have")
    return None  # an ordinary user who is root only here


def become(user: int) -> None:
    """Changes user and group for good, and with them loses all capabilities."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def give_up_rights(user: int | None) -> None:
    """Becomes ``user``, if there is one, and drops all capabilities, for good."""
    kernel.bound_capabilities()
    try:
        if user is not None:
            become(user)
    except OSError as error:
        raise PermissionError(f"root's programs run as nobody, and root may not become nobody here: {error}") from None
    kernel.drop_capabilities()


def _is_root_outside() -> bool:
    """Whether the namespace's root is root where it was created, or may be."""
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return not any(int(inner) == 0 != int(outer) for inner, outer, _ in lines)


def _largest_id(name: str) -> int:
    """The largest id in this process's own namespace."""
    lines = Path(f"/proc/self/{name}").read_text().splitlines()
    return max(int(line.split()[0]) + int(line.split()[2]) - 1 for line in lines)
