"""Commands of Slurm: runs them, checks that a controller answers, and reads their times."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.shown import show

_ASK_SECONDS = 20.0
# `scontrol ping` takes hundredths of a second. If it hangs, the configuration is wrong, munge is dead, or the
# controller is overloaded, which is worth waiting for.
_PING_SECONDS, _SLOW_SECONDS = 1.5, 15.0
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/usr/local/etc/slurm.conf")
# Errors of a command that no controller has answered.
AWAY = re.compile(r"unable to contact|timed out|connection refused|zero bytes", re.I)
_MUNGE_SOCKET = "/run/munge/munge.socket.2"
# Prefixes of variables in which users keep filters and formats; they would change the output that is parsed here.
_FILTERS = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_")
_own: list[str] = []  # name of this machine's cluster, once it is known


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def ask(*command: str, seconds: float = _ASK_SECONDS, cluster: str | None = None) -> CommandResult:
    """Runs a command of Slurm, in English and with times as ISO 8601. Raises UserError where it is absent or hangs.

    ``cluster``: name of the cluster that it asks; default: this machine's. For another one, Slurm asks the accounting
    database for the address.
    """
    if cluster and _own_cluster() not in ("", cluster):
        command = (command[0], "-M", cluster, *command[1:])
    try:
        return _run(command, seconds)
    except FileNotFoundError:
        raise _no_slurm(command[0]) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{' '.join(command[:3])}` did not answer within {seconds:.0f} s",
            where="slurm",
            remedy="try again later; the controller may be overloaded",
        ) from None


def output_of(*command: str, seconds: float = _ASK_SECONDS, cluster: str | None = None) -> str:
    """Output of a command of Slurm; empty where it fails, is absent or hangs."""
    try:
        answer = ask(*command, seconds=seconds, cluster=cluster)
    except UserError:
        return ""
    return "" if answer.code else answer.out


def require_controller() -> None:
    """Raises UserError if no controller answers, within two seconds where it is dead."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        raise _no_slurm("sbatch")
    configured = os.environ.get(env.SLURM_CONF)
    if configured and not Path(configured).is_file():
        raise UserError(
            f"no such file {configured!r}",
            where=env.SLURM_CONF,
            remedy="correct the variable, or unset it for the site's default",
        )
    answer = _ping(_PING_SECONDS)
    if answer is None:
        _refuse_without_munge()
        show("rlhpc: Slurm's controller is slow to answer; waiting for it", file=sys.stderr)
        answer = _ping(_SLOW_SECONDS)
    if answer is not None and re.search(r"\bis UP\b", answer.out):
        return
    _refuse_without_munge()
    if answer is not None and "fatal" in answer.err:
        raise UserError(
            f"the Slurm configuration cannot be used: {last_line(answer.err)}",
            where="slurm",
            remedy=f"log in to a login node of the cluster, or set {env.SLURM_CONF}",
        )
    hosts = re.findall(r"^Slurmctld\(\w+\) at (\S+) is DOWN", answer.out if answer else "", re.MULTILINE)
    down = f" (down: {', '.join(hosts)})" if hosts else ""
    raise UserError(
        f"the controller does not answer{down}",
        where="slurm",
        remedy="wait until `scontrol ping` reports it up, or inform the administrators; submitted jobs continue",
    )


def last_line(text: str) -> str:
    """The last line that is not empty, without the name of the command in front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: (error|fatal): ", "", lines[-1]) if lines else ""


@contextmanager
def private_files() -> Iterator[None]:
    """Context in which new files are readable by the user alone; sbatch passes the mask on to the job."""
    mask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(mask)


@contextmanager
def clean_submission(options: frozenset[str]) -> Iterator[None]:
    """Context without variables that would override options of the script, or pass on the job that this process runs
    in to the new job."""
    before = dict(os.environ)
    for name in before:
        of_outer_job = name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name != env.SLURM_CONF
        if _overrides(name, options) or (env.SLURM_JOB_ID in before and of_outer_job):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _overrides(name: str, options: frozenset[str]) -> bool:
    """True if sbatch, or srun in the job, would take an option from this variable instead of the script."""
    if name in (env.SBATCH_EXPORT, env.SLURM_EXPORT_ENV) or (name == env.SLURM_CLUSTERS and "clusters" in options):
        return True
    if not name.startswith("SBATCH_"):
        return False
    aliases = {"timelimit": "time", "mem-per-node": "mem", "no-requeue": "requeue", "array-inx": "array"}
    option = name.removeprefix("SBATCH_").lower().replace("_", "-")
    return aliases.get(option, option) in {*options, "array", "job-name", "open-mode", "wait", "output", "error"}


def _own_cluster() -> str:
    """Name of this machine's cluster; empty if no controller answers."""
    if not _own:
        found = re.search(r"^ClusterName\s*=\s*(\S+)", ask("scontrol", "show", "config").out, re.MULTILINE)
        _own.extend([found[1]] if found else [])
    return _own[0] if _own else ""


def _environment() -> dict[str, str]:
    filters = (*_FILTERS, *([env.SLURM_CLUSTERS] if env.SLURM_JOB_ID in os.environ else []))  # a job asks its own
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(filters)}
    return {**inherited, env.LC_ALL: "C", env.SLURM_TIME_FORMAT: "standard"}


def _no_slurm(command: str) -> UserError:
    return UserError(
        f"no Slurm on this machine: `{command}` not found",
        where=socket.gethostname(),
        remedy="log in to a login node of the cluster, or use `rlhpc run` on this machine",
    )


def _ping(seconds: float) -> CommandResult | None:
    with suppress(subprocess.TimeoutExpired):
        return _run(("scontrol", "ping"), seconds)
    return None


def _run(command: Sequence[str], seconds: float) -> CommandResult:
    done = subprocess.run(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def _refuse_without_munge() -> None:
    """Raises UserError if munge is down: Slurm's commands would try for two seconds first."""
    path = _munge_socket()
    if path is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(path)
        except OSError as error:
            raise munge_error(f"{path}: {error.strerror or error}") from None


def munge_error(detail: str) -> UserError:
    return UserError(
        f"munge, Slurm's authentication service, does not run on this machine ({detail})",
        where=socket.gethostname(),
        remedy="use another login node, or ask the administrators to start munged",
    )


def _munge_socket() -> str | None:
    """Munge's socket by slurm.conf; None if it is unknown or munge is not used."""
    names = [os.environ.get(env.SLURM_CONF) or "", *_CONFIGURATIONS]
    file = next((Path(name) for name in names if name and Path(name).is_file()), None)
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    kind = re.search(r"^\s*AuthType\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    if kind and kind.group(1) != "auth/munge":
        return None
    path = re.search(r"^\s*AuthInfo\s*=.*?socket=([^,\s]+)", text, re.MULTILINE | re.IGNORECASE)
    return path.group(1) if path else _MUNGE_SOCKET


def seconds_of(text: str | int) -> int | None:
    """Seconds of a duration as sbatch takes it and squeue shows it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None for
    anything else, such as UNLIMITED, NOT_SET or N/A."""
    days, dash, rest = str(text).strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, *([days] if dash else []))) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def time_of(text: str) -> float | None:
    """Unix time of 2026-11-21T10:31:00 in this machine's time zone; None for N/A, Unknown, None."""
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return None


def clock(time: float, now: float) -> str:
    """A time as 14:05, with the day if it is not today."""
    moment, today = datetime.fromtimestamp(time), datetime.fromtimestamp(now)
    return moment.strftime("%H:%M" if moment.date() == today.date() else "%a %d %b %H:%M")
