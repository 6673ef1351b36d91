"""Submits jobs to Slurm through submitit, renders their script, and explains what sbatch refuses.

An error of sbatch becomes one line that names the key at fault.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.jobs import SlurmSection
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.exits import without_secrets
from rlhpc.core.files import write_atomic
from rlhpc.core.imports import import_attribute
from rlhpc.core.redaction import guard_output
from rlhpc.launch.slurm.commands import clean_submission, last_line, munge_error, output_of
from rlhpc.launch.slurm.job_spec import OPTION_KEYS, SECRETS, JobSpec
from rlhpc.launch.slurm.partitions import NodeGroup, in_slurm_words, read_partitions

JOB = "rlhpc.launch.supervise.supervisor:run_job"
_NAMES_SECONDS = 3.0  # the names only improve a message
_ADMINISTRATORS = "try again, and inform the administrators if it persists"

Builder = Callable[[SlurmSection, str], UserError]


@dataclass(frozen=True)
class SubmittedJob:
    """One submitted job: its id (array elements as 7_3) and the log of its batch step."""

    job_id: str
    log: Path


def call_job(entry: str, run_dir: str) -> None:
    """Function that submitit calls in the batch step: calls ``entry`` with the run folder and exits with its code."""
    guard_output()
    try:
        code = import_attribute(entry, "job")(run_dir)
    except Exception as error:
        known = without_secrets(error)
        if known is error:
            raise
        raise known from None
    if code:
        raise SystemExit(code)


def script(spec: JobSpec, folder: Path, jobs: int = 1) -> str:
    """Text of the script for one job or an array of ``jobs``, with submitit's files in ``folder``."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{spec.python} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    count = jobs if jobs > 1 else None
    return str(_make_sbatch_string(command=command, folder=folder, map_count=count, **_parameters(spec)))


def submit_jobs(
    spec: JobSpec, folder: Path, run_dirs: Sequence[Path], slurm: SlurmSection, entry: str = JOB
) -> list[SubmittedJob]:
    """Submits one job for each run folder, as an array if there are several. Raises UserError if Slurm refuses."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    with clean_submission(frozenset(name for name, _ in spec.options)):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_secrets(spec, folder)
        executor = SlurmExecutor(folder=folder, python=spec.python)
        executor.update_parameters(**_parameters(spec))
        printed = io.StringIO()
        try:
            array = executor.batch() if len(run_dirs) > 1 else contextlib.nullcontext()
            with contextlib.redirect_stderr(printed), array:  # submitit prints its exceptions
                jobs = [executor.submit(call_job, entry, str(run_dir)) for run_dir in run_dirs]
        except (FailedJobError, FailedSubmissionError) as error:
            raise submission_error(str(error) or printed.getvalue(), slurm) from None
    return [SubmittedJob(str(job.job_id), Path(job.paths.stdout)) for job in jobs]


def write_secrets(spec: JobSpec, folder: Path) -> None:
    """Writes the file in ``folder`` that the script reads its secrets from, if there are any."""
    if spec.secrets:
        write_atomic(folder / SECRETS, "\n".join([*spec.secrets, ""]), private=True)


def check_folder_name(folder: Path) -> None:
    """Raises UserError for characters that Slurm replaces in names of log files, such as %j."""
    if "%" in str(folder) or "\\" in str(folder) or "\n" in str(folder):
        raise UserError(f"{str(folder)!r} contains a % or a backslash", where="run_dir", remedy="choose another folder")


def _parameters(spec: JobSpec) -> dict[str, Any]:
    """Parameters of submitit's executor. Its own wckey, signal and time are replaced. Nodes and tasks go to sbatch
    only: ranks are not submitit's tasks, srun starts them inside the job."""
    return {
        "use_srun": False,
        "stderr_to_stdout": True,
        "wckey": None,
        "setup": list(spec.setup),
        "time": None,
        "array_parallelism": 256,
        "additional_parameters": {{"job-name": "job_name"}.get(name, name): value for name, value in spec.options},
    }


def submission_error(text: str, slurm: SlurmSection) -> UserError:
    """UserError for sbatch's stderr. May run sinfo and sacctmgr for the names that exist."""
    for pattern, build in _TABLE:
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            return build(slurm, match.groupdict().get("what") or match.group(0))
    message = last_line(text).removeprefix("Batch job submission failed: ")
    reason = message or "no message from sbatch"
    return UserError(f"sbatch refused the job: {reason}", where="slurm", remedy="see `man sbatch`")


def _partition(slurm: SlurmSection, what: str) -> UserError:
    names = {group.partition for group in _groups(slurm)}
    default = f"no default partition ({what})"
    wrong = f"no partition {slurm.partition!r}" if slurm.partition else default
    return UserError(wrong, where="slurm.partition", remedy=_choose(slurm.partition, names))


def _account(slurm: SlurmSection, what: str) -> UserError:
    names = _associations("account")
    if slurm.account is None:
        return UserError("no account to charge this job to", where="slurm.account", remedy=_choose(None, names))
    wrong = f"account {slurm.account!r} is unknown, or not available to you in this partition"
    return UserError(wrong, where="slurm.account", remedy=_choose(slurm.account, names))


def _qos(slurm: SlurmSection, what: str) -> UserError:
    names = {name for entry in _associations("qos") for name in entry.split(",")}
    wrong = f"QoS {slurm.qos!r} is unknown, or not available to you" if slurm.qos else "the job needs a QoS"
    return UserError(wrong, where="slurm.qos", remedy=_choose(slurm.qos, names))


def _configuration(slurm: SlurmSection, what: str) -> UserError:
    wanted = slurm.partition.split(",") if slurm.partition else None
    groups = [group for group in _groups(slurm) if wanted is None or group.partition in wanted]
    have = f"its nodes have {_capacity(groups)}" if groups else "see `sinfo -o '%P %D %c %m %G'`"
    place = f"partition {slurm.partition}" if slurm.partition else "the partition"
    return UserError(f"no node of {place} has the requested resources", where="slurm", remedy=f"request less: {have}")


def _time(slurm: SlurmSection, what: str) -> UserError:
    wanted = slurm.partition.split(",") if slurm.partition else None
    limits = [
        group.limit
        for group in _groups(slurm)
        if group.limit and (group.partition in wanted if wanted else group.default)
    ]
    remedy = f"use at most {in_slurm_words(max(limits))}" if limits else "lower it"
    return UserError(f"{slurm.time} is longer than allowed", where="slurm.time", remedy=remedy)


def _value(slurm: SlurmSection, what: str) -> UserError:
    """Error for a value of option ``what`` that sbatch rejects."""
    key = OPTION_KEYS.get(what, f"slurm.sbatch_options.{what}")
    return UserError(f"sbatch rejects this value of --{what}", where=key, remedy="see `man sbatch`")


def _key(key: str, message: str, remedy: str) -> Builder:
    """Builder of an error whose message has the value of a key as {value}, and sbatch's words as {what}."""

    def build(slurm: SlurmSection, what: str) -> UserError:
        name = key.removeprefix("slurm.")
        value = getattr(slurm, name, None)
        value = ",".join(value) if isinstance(value, list) else value
        value = "the requested amount" if value is None else value
        return UserError(message.format(value=value, what=what), where=key, remedy=remedy)

    return build


# Tried in this order: of several lines of sbatch, the first are more precise than the last.
_TABLE: tuple[tuple[str, Builder], ...] = (
    (r"munge|protocol authentication error|authentication (failure|error)",
     lambda slurm, what: munge_error("Slurm could not authenticate you")),
    (r"unable to contact slurm controller|connect failure|socket timed out|no route to host|connection refused",
     _key("slurm", "the controller does not answer", "wait until `scontrol ping` reports it up, then submit again")),
    (r"invalid partition|no partition specified|no default partition", _partition),
    (r"invalid account", _account),
    (r"invalid qos|qos .*not permitted", _qos),
    (r"invalid wckey", _key("slurm.sbatch_options.wckey", "the site requires a valid wckey", "name one of yours")),
    (r"reservation (is invalid|.*invalid)|requested reservation|access denied to requested reservation",
     _key("slurm.reservation", "no reservation {value!r} is open to you now", "see `scontrol show reservation`")),
    (r"invalid feature", _key("slurm.constraint", "no node has the features {value!r}", "see `sinfo -o '%P %f'`")),
    (r"memory specification can not be satisfied|--mem specification",
     _key("slurm.memory", "no node has that much memory: {value}", "lower it; see `sinfo -o '%P %m'` (MiB)")),
    (r"(requested time limit is invalid|time limit exceeds|invalid --time|time limit .*(invalid|exceeded))", _time),
    (r"invalid generic resource", _key("slurm.gpus_per_node", "this cluster has no such GPUs (gres)",
                                       "set slurm.gpus_per_node and slurm.gpu_type to what `sinfo -o '%P %G'` shows; "
                                       "where sbatch does not take --gpus-per-node, set slurm.gpu_request to gres "
                                       "(--gres=gpu:N), or to none if Slurm does not manage the GPUs")),
    (r"node count specification invalid|not a valid node count|too many nodes|exceeds partition .*node",
     _key("slurm.nodes", "{value} nodes are not allowed here", "see `scontrol show partition`")),
    (r"invalid node name", _key("slurm.exclude", "unknown node in {value!r}", "see `sinfo -N`")),
    (r"invalid license", _key("slurm.sbatch_options.licenses", "no such license", "see `scontrol show licenses`")),
    (r"unrecognized option '--(?P<what>[\w-]+)",
     _key("slurm.sbatch_options", "this cluster's sbatch has no option {what!r}", "see `man sbatch`")),
    (r"invalid --(?P<what>[\w-]+) specification", _value),
    (r"requested node configuration is not available|requested partition configuration not available", _configuration),
    (r"job violates accounting/qos policy \(job submit limit[^)]*\)|job violates accounting/qos policy",
     _key("slurm", "limits of your account or QoS do not allow this job ({what})", "request fewer nodes or GPUs or "
          "less time, or submit when your other jobs have ended")),
    (r"user'?s group not permitted|not permitted to use this partition|access/permission denied",
     _key("slurm.partition", "you have no access to partition {value}", "name another")),
    (r"required node not available|required partition not available|is (down|drained|inactive)",
     _key("slurm.partition", "partition {value} takes no jobs at present", "name another, or wait")),
    (r"no space left|disk quota|i/o error writing script",
     _key("slurm", "the controller could not store the job script ({what})", _ADMINISTRATORS)),
)  # fmt: skip


def _groups(slurm: SlurmSection) -> list[NodeGroup]:
    with contextlib.suppress(UserError):
        return read_partitions(slurm.cluster)
    return []


def _associations(field: str) -> set[str]:
    """Accounts or QoSes of this user; empty without an accounting database."""
    from getpass import getuser

    try:
        user = f"user={getuser()}"
    except (OSError, KeyError):
        return set()
    found = output_of("sacctmgr", "-n", "-P", "show", "assoc", user, f"format={field}", seconds=_NAMES_SECONDS)
    return {line.strip() for line in found.splitlines() if line.strip()}


def _choose(name: str | None, names: set[str]) -> str:
    if not names:
        return "name another; see the site's documentation"
    return did_you_mean(name, names) if name else "name one of " + ", ".join(sorted(names))


def _capacity(groups: list[NodeGroup]) -> str:
    """``8 CPUs, 8,000 MiB, 4 h100 GPUs``, once per kind of node."""
    texts = []
    for group in groups:
        gpus = [f"{count} {kind + ' ' if kind else ''}GPUs" for kind, count in group.gpus] or ["no GPUs"]
        texts.append(f"{group.cpus} CPUs, {group.memory_mib:,} MiB, {', '.join(gpus)}")
    return " or ".join(dict.fromkeys(texts))
