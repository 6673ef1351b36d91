"""Whether a folder for temporary files has room, and lets compiled kernels be loaded. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlhpc.core import env

# A rank's compiled kernels, sockets and folders of reward programs; caches that grow need more.
_BYTES_PER_RANK, _FILES_PER_RANK = 64 << 20, 256


def too_small(folder: str, ranks: int) -> str:
    """Why the folder is too small for the ranks of a node; empty if it has room, or if its file system does not say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    free, needed = found.f_bavail * found.f_frsize, ranks * _BYTES_PER_RANK
    if found.f_blocks and free < needed:
        return f"has only {free >> 20} MiB free of the {needed >> 20} that its ranks need"
    files = ranks * _FILES_PER_RANK
    if found.f_files and found.f_favail < files:
        return f"has room for only {found.f_favail:,} more files"
    return ""


def not_executable(folder: str, environ: Mapping[str, str]) -> str:
    """Why kernels that are compiled in the folder cannot be loaded; empty if they can, or if ranks compile nothing."""
    if env.CUDA_DEVICE_MAX_CONNECTIONS not in environ and environ.get(env.TORCHDYNAMO_DISABLE) != "0":
        return ""  # ranks on CPUs
    try:
        flags = os.statvfs(folder).f_flag
    except OSError:
        return ""
    return "is mounted noexec, so that compiled kernels cannot be loaded" if flags & os.ST_NOEXEC else ""
