"""``rlhpc submit`` and ``rlhpc resume``: check, prepare and submit a run, and refuse a job that can never start.

A run is one Slurm job, or that of the trainers and rollout jobs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.config.load import absolute_paths, load_config
from rlhpc.config.saved import save_config
from rlhpc.config.schema import GPUS_KEY, RANKS_KEY, RunConfig, with_job_ranks
from rlhpc.core import attempts, env
from rlhpc.core.attempts import next_attempt
from rlhpc.core.errors import Faults, UserError
from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import hide
from rlhpc.core.shown import show
from rlhpc.launch.container import container_warnings
from rlhpc.launch.machine import check_planned_driver, package_warnings, profile_warnings
from rlhpc.launch.resolved import resolved
from rlhpc.launch.roles import outlives_nodes
from rlhpc.launch.run_lock import locked
from rlhpc.launch.runs.preflight import check_architectures, check_ground_truths, walltime_warnings
from rlhpc.launch.runs.prepare import run_prepare
from rlhpc.launch.runs.run_registry import RunEntry, new_record, read_run, register
from rlhpc.launch.slurm.commands import ask, private_files, require_controller
from rlhpc.launch.slurm.executor import JOB, SubmittedJob, check_folder_name, script, submit_jobs
from rlhpc.launch.slurm.job_spec import JobSpec, gpus_per_node, make_spec
from rlhpc.launch.slurm.partitions import NodeGroup, check_partitions, most_nodes, read_partitions
from rlhpc.launch.slurm.queue import JobStatus, read_jobs
from rlhpc.launch.supervise.srun import first_commands
from rlhpc.plan.checks.absent import absent_inputs, not_checked
from rlhpc.plan.checks.run import check_config, largest_usable
from rlhpc.plan.checks.slurm import check_archive_file

# The reason appears after the scheduler has looked at the job: at once on an idle cluster, in its next round otherwise.
_REASON_SECONDS, _POLL_SECONDS = 2.0, 0.1
_OWN_DISKS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # local to a node
# Keys of the slurm section that are not part of the script and may differ between the runs of an array.
_NOT_IN_SCRIPT = {
    *("container", "environment_archive", "interface", "rendezvous_host", "cpu_bind", "srun_options", "port"),
}
ROLLOUT_JOB = "rlhpc.launch.supervise.rollout_jobs:run_rollout_job"


@dataclass(frozen=True)
class Plan:
    """Runs that become one job or one job array, or one run with rollout jobs. ``submission``: folder of submitit's
    files."""

    configs: tuple[RunConfig, ...]
    folders: tuple[RunFolder, ...]
    spec: JobSpec
    workdir: Path
    submission: Path
    warnings: tuple[str, ...] = ()  # what may stop the runs later, with key, value and remedy
    rollout: JobSpec | None = None  # of each rollout job

    @property
    def script(self) -> str:
        """Text that sbatch gets."""
        return script(self.spec, self.submission, len(self.configs))

    @property
    def rollout_script(self) -> str:
        """Text of rollout jobs that sbatch gets; empty without any."""
        jobs = self.configs[0].slurm.rollout_jobs
        if self.rollout is None or jobs is None:
            return ""
        return script(after("JOB", self.rollout), self.folders[0].rollout_submission, jobs.count)

    @property
    def command(self) -> str:
        """Command that submits it; the file name ends in a random number."""
        return f"sbatch {self.submission}/.submission_file_*.sh"

    @property
    def srun(self) -> list[str]:
        """Commands that start the ranks of each run in the job, on as many nodes as it can use: NODE1, NODE2, …"""
        lines: list[str] = []
        for config, folder in zip(self.configs, self.folders, strict=True):
            count = largest_usable(config, config.slurm.most_nodes) or config.slurm.most_nodes
            nodes = [f"NODE{number}" for number in range(1, count + 1)]
            lines += map(shlex.join, first_commands(absolute_paths(config), nodes, next_attempt(folder)))
        return lines


def make_plan(configs: Sequence[RunConfig], workdir: Path, *, dry_run: bool = False) -> Plan:
    """Plan of a submission. Reads input files, changes nothing. Raises UserError for configs that cannot work.

    ``dry_run``: the plan is only shown. Absent weights, tokenizers and data files are warnings then.
    """
    faults = Faults()
    for config in configs:
        with faults.collect():
            if with_job_ranks(config) is None:
                raise UserError(
                    f"neither this nor {RANKS_KEY} is set",
                    where=GPUS_KEY,
                    remedy=f"set {GPUS_KEY} in the config or the site file (0: ranks on CPUs), or {RANKS_KEY}",
                )
    configs = [with_job_ranks(config) or config for config in configs]
    folders = tuple(RunFolder(workdir / config.folder) for config in configs)
    warnings: list[str] = []
    for config, folder in zip(configs, folders, strict=True):
        with faults.collect():
            prepared = config.prepare is None
            absent = absent_inputs(config) if dry_run and prepared else {}
            found = check_config(config, prepared=prepared, starting=not dry_run, workdir=workdir, absent=absent)
            warnings += [text for topic, text in found if topic == "warning"] + walltime_warnings(config)
            warnings += not_checked(absent)
        with faults.collect():
            check_folder_name(folder.path)
        with faults.collect():
            warnings += container_warnings(config, folder.path, workdir)
    with faults.collect():
        _check_alike(configs, folders)
    if not faults.errors:  # which may be of the files to read
        with faults.collect():
            warnings += check_ground_truths(configs)
        with faults.collect():
            warnings += check_architectures(configs)
    conda = os.environ.get(env.CONDA_EXE, "conda")
    submission = folders[0].submission
    if len(configs) > 1:
        name = hashlib.sha256("\n".join(str(folder.path) for folder in folders).encode()).hexdigest()[:12]
        submission = folders[0].path.parent / ".arrays" / name
    specs = []
    for config in configs:
        with faults.collect():
            specs.append(trainers_spec(config, workdir, sys.executable, conda, submission))
        with faults.collect():
            check_planned_driver(config)
        with faults.collect():
            check_archive_file(config)
    faults.raise_all()
    warnings += [*package_warnings(configs[0]), *profile_warnings(configs[0])]
    rollout = None
    if configs[0].all_rollout_job_nodes:
        rollout = rollout_spec(configs[0], workdir, sys.executable, conda, folders[0].rollout_submission)
    return Plan(tuple(configs), folders, specs[0], workdir, submission, tuple(dict.fromkeys(warnings)), rollout)


def submit(
    plan: Plan, *, again: bool = False, over: bool = False, keep: bool = False, entry: str = ""
) -> list[RunEntry]:
    """Submits the plan to Slurm and returns its runs. Raises UserError.

    ``again``: the folder contains the run to resume; ``over``: it has ended, though its job may last a little longer.
    ``keep``: a job that can never start stays in the queue. ``entry``: function that the batch step calls with the run
    folder, instead of the supervisor's.
    """
    require_controller()
    with private_files():
        return _submit(plan, entry or JOB, again=again, over=over, keep=keep)


def _submit(plan: Plan, entry: str, *, again: bool, over: bool, keep: bool) -> list[RunEntry]:
    groups = read_partitions(plan.configs[0].slurm.cluster)
    for config in plan.configs:
        check_partitions(trainers_part(config), groups, gpus_per_node(config))
        if plan.rollout is not None:
            check_partitions(rollout_part(config), groups, gpus_per_node(rollout_part(config)))
    _warn_of_own_disks(plan)
    with contextlib.ExitStack() as stack:
        for folder in plan.folders:
            waits = "dependency" in plan.configs[0].slurm.sbatch_options
            stack.enter_context(claimed(folder, again=again, over=over, waits=waits))
        _prepare(plan.configs)
        for config, folder in zip(plan.configs, plan.folders, strict=True):
            stack.enter_context(written_submission(config, folder))
        run_dirs = [folder.path for folder in plan.folders]
        jobs = submit_jobs(plan.spec, plan.submission, run_dirs, plan.configs[0].slurm, entry)
        try:
            rollout = _submit_rollout_jobs(plan, jobs[0].job_id)
            runs = [_record(plan, index, job, rollout) for index, job in enumerate(jobs)]
        except BaseException:  # a job without a record would leave by itself, but only when it starts
            ask("scancel", *(job.job_id for job in jobs), cluster=plan.configs[0].slurm.cluster)
            raise
    states = wait_for_reason([job.job_id for job in jobs], plan.configs[0].slurm.cluster)
    if not keep:
        refuse_hopeless(trainers_part(plan.configs[0]), states, groups)
    return runs


def _submit_rollout_jobs(plan: Plan, trainers: str) -> str:
    """Submits the rollout jobs of a run whose trainers' job has been submitted; returns their id, empty without any."""
    jobs, folder = plan.configs[0].slurm.rollout_jobs, plan.folders[0]
    if plan.rollout is None or jobs is None:
        return ""
    former = read_run(folder.path).job
    if former is not None and former.rollout_job:  # they may not have seen yet that the run has ended
        ask("scancel", former.rollout_job, cluster=former.cluster)
    spec, slurm = after(trainers, plan.rollout), rollout_part(plan.configs[0]).slurm
    found = submit_jobs(spec, folder.rollout_submission, [folder.path] * jobs.count, slurm, ROLLOUT_JOB)
    return found[0].job_id.partition("_")[0]


@contextlib.contextmanager
def claimed(
    folder: RunFolder, *, again: bool, over: bool = False, wait: bool = False, waits: bool = False
) -> Iterator[None]:
    """Context that has the run folder to itself, from the check that it is free to the record of its job.

    ``wait``: for another launcher to leave the folder; ``over``, ``waits``: see ``check_free``. If the block fails, a
    new folder is removed. Raises UserError.
    """
    folder.check_own()
    new = not folder.path.exists()
    folder.create()
    with locked(folder, wait=wait):
        try:
            check_free(folder, again=again, over=over, waits=waits)
            yield
        except BaseException:
            if new:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise


def check_free(folder: RunFolder, *, again: bool, over: bool = False, waits: bool = False) -> None:
    """Raises UserError if a job uses the folder, or if it contains a run and ``again`` is false. ``over``: its run has
    ended, although Slurm may still list its job; ``waits``: the new job depends on others."""
    job = read_run(folder.path).job if not over else None
    status = read_jobs([job.job_id], job.cluster).get(job.job_id) if job else None
    if status is not None and status.live and waits:
        raise UserError(
            f"job {status.job_id} of this run is {status.words}, and a second one would take the run from it, even if "
            f"it waits for its end: {str(folder.path)!r}",
            where="slurm.sbatch_options.dependency",
            remedy=f"resume the run when the job has ended, see `rlhpc status {status.job_id}`",
        )
    if status is not None and status.live:
        raise UserError(
            f"job {status.job_id} of this run is {status.words}: {str(folder.path)!r}",
            where="run_dir",
            remedy=f"watch it with `rlhpc status {status.job_id}`, or end it with `rlhpc cancel {status.job_id}`",
        )
    if folder.holds_run() and not again:
        raise UserError(
            f"{str(folder.path)!r} already contains a run",
            where="run_dir",
            remedy=f"resume it with `rlhpc resume {folder.path}`, or choose another folder with --run-dir",
        )
    folder.check_own()


def wait_for_reason(ids: Sequence[str], cluster: str | None = None) -> dict[str, JobStatus]:
    """The jobs as soon as each has started or has a reason to wait, or after two seconds; none if Slurm does not
    answer."""
    deadline = time.monotonic() + _REASON_SECONDS
    while True:
        try:
            jobs = read_jobs(ids, cluster)
        except UserError:  # the jobs are in the queue, even if it cannot be read now
            return {}
        # With too many nodes the reason is PartitionConfig first, then PartitionNodeLimit.
        unclear = [job for job in jobs.values() if job.queued and job.reason in ("", "PartitionConfig")]
        if (len(jobs) == len(ids) and not unclear) or time.monotonic() > deadline:
            return jobs
        time.sleep(_POLL_SECONDS)


def refuse_hopeless(config: RunConfig, jobs: dict[str, JobStatus], groups: Sequence[NodeGroup]) -> None:
    """Cancels jobs that can never start as requested, and raises UserError with the reason."""
    for job in jobs.values():
        started = job.live and not job.queued
        if started or not is_hopeless(job, config, groups, alone=len(jobs) == 1):
            continue
        ask("scancel", job.job_id.partition("_")[0], cluster=config.slurm.cluster)
        raise UserError(
            f"job {job.job_id} could never start, because it {job.why.words} ({job.reason}), and was cancelled",
            where=job.why.key or "slurm",
            remedy=f"{job.why.remedy or 'change it'}; --keep leaves such a job in the queue",
        )


def is_hopeless(job: JobStatus, config: RunConfig, groups: Sequence[NodeGroup], *, alone: bool) -> bool:
    """True if the job can never start as requested. ``alone``: it is the only one of this submission."""
    why = job.why
    if why.code.startswith("PartitionNodeLimit"):  # also while nodes are down
        wanted = config.slurm.partition.split(",") if config.slurm.partition else None
        fitting = [group for group in groups if (group.partition in wanted if wanted else group.default)]
        return bool(fitting) and most_nodes(fitting) < config.slurm.least_nodes
    if why.kind == "limit" and "PerUser" in why.code and alone:  # without other jobs, this one alone exceeds the limit
        user, states = str(os.getuid()), "R,CG,CF,S,PD"
        answer = ask("squeue", "-h", "-a", "-u", user, "-t", states, "-o", "%i", cluster=config.slurm.cluster)
        ids = [line for line in answer.out.splitlines() if not line.startswith("CLUSTER:")]
        return answer.code == 0 and ids == [job.job_id]
    return why.kind == "never"


def _check_alike(configs: Sequence[RunConfig], folders: Sequence[RunFolder]) -> None:
    """Raises UserError if runs of an array share a folder, or differ in a part of the shared script."""
    first = configs[0]
    if len(configs) > 1 and first.slurm.rollout_jobs is not None:
        raise UserError(
            f"set in {first.name!r}, but a job array has one job for each run",
            where="slurm.rollout_jobs",
            remedy="submit the runs one by one",
        )
    for number, (config, folder) in enumerate(zip(configs, folders, strict=True)):
        same = next((other for other in range(number) if folders[other].path == folder.path), None)
        if same is not None:
            raise UserError(
                f"{config.name!r} and {configs[same].name!r} would both write to {str(folder.path)!r}",
                where="run_dir",
                remedy="give each its own name or run_dir",
            )
        for name in type(config.slurm).model_fields:
            ours, theirs = getattr(first.slurm, name), getattr(config.slurm, name)
            if ours != theirs and name not in _NOT_IN_SCRIPT:
                raise _unlike(f"slurm.{name}", first, ours, config, theirs)
        ranks, other_ranks = first.resources.ranks_per_node, config.resources.ranks_per_node
        if ranks != other_ranks:
            raise _unlike("resources.ranks_per_node", first, ranks, config, other_ranks)


def _unlike(key: str, first: RunConfig, ours: object, other: RunConfig, theirs: object) -> UserError:
    ours, theirs = (hide(value, key)[0] for value in (ours, theirs))
    return UserError(
        f"{ours!r} in {first.name!r}, {theirs!r} in {other.name!r}, but all jobs of an array have the same",
        where=key,
        remedy=f"make them equal (also on the command line: {key}=…), or submit them one by one",
    )


def _warn_of_own_disks(plan: Plan) -> None:
    for path in dict.fromkeys([*(folder.path for folder in plan.folders), plan.workdir]):
        disk = next((disk for disk in _OWN_DISKS if path.is_relative_to(disk)), None)
        if disk is not None:
            show(f"rlhpc: warning: {path} is in {disk}, which is usually local to each node", file=sys.stderr)


def _prepare(configs: Sequence[RunConfig]) -> None:
    """Prepares the inputs now, so that errors in them appear before the job waits in the queue."""
    for config in configs:
        if config.prepare is None:
            continue
        if not run_prepare(config.prepare):
            raise UserError(f"{config.prepare.function} failed, see above", where="prepare.function")
        check_config(config)
        for warning in (*check_ground_truths([config]), *check_architectures([config])):
            show(f"rlhpc: warning: {warning}", file=sys.stderr)


@contextlib.contextmanager
def written_submission(config: RunConfig, folder: RunFolder) -> Iterator[None]:
    """Context with the config written to the run folder, which is restored if the block fails."""
    before = {file: file.read_text(encoding="utf-8") for file in (folder.secrets, folder.config) if file.is_file()}
    try:
        save_config(folder, resolved(config, folder))
        folder.stop_requested.unlink(missing_ok=True)
        yield
    except BaseException:
        folder.secrets.unlink(missing_ok=True)
        for file, text in before.items():
            write_atomic(file, text, private=True)
        raise


def _record(plan: Plan, index: int, job: SubmittedJob, rollout: str) -> RunEntry:
    folder, config = plan.folders[index], plan.configs[index]
    record = new_record(job.job_id, config.name, plan.workdir, job.log, config.slurm.cluster or "", rollout)
    register(folder, record)
    return RunEntry(folder, record)


def trainers_part(config: RunConfig) -> RunConfig:
    """The configuration of the trainers' job by the resources that it requests from Slurm: without nodes of rollout
    jobs."""
    others = config.all_rollout_job_nodes
    return _with_slurm(config, nodes=config.slurm.least_nodes - others) if others else config


def rollout_part(config: RunConfig) -> RunConfig:
    """The configuration of a rollout job by the resources that it requests from Slurm."""
    jobs, slurm = config.slurm.rollout_jobs, config.slurm
    assert jobs is not None, "there are rollout jobs"
    own = {name: value for name, value in jobs if name not in ("count", "nodes") and value is not None}
    options = {name: value for name, value in slurm.sbatch_options.items() if name.lstrip("-") != "dependency"}
    changed = _with_slurm(config, nodes=config.rollout_job_nodes, sbatch_options=options, **own)
    return changed.model_copy(update={"name": f"{config.name}-rollout"})


def trainers_spec(config: RunConfig, workdir: Path, python: str, conda: str, submission: Path) -> JobSpec:
    """The job that trains."""
    part = trainers_part(config)
    return make_spec(part, workdir, python, conda, submission, outlives_nodes=outlives_nodes(config))


def rollout_spec(config: RunConfig, workdir: Path, python: str, conda: str, submission: Path) -> JobSpec:
    """A rollout job. Its dependency on the trainers' job is added when that has its id."""
    return make_spec(rollout_part(config), workdir, python, conda, submission)


def after(job_id: str, spec: JobSpec) -> JobSpec:
    """The job with a dependency: it starts after another one has, which may have ended by then."""
    return replace(spec, options=(*spec.options, ("dependency", f"after:{job_id}")))


def _with_slurm(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"slurm": config.slurm.model_copy(update={**changes, "rollout_jobs": None})})


def plan_again(run: RunEntry, overrides: Sequence[str], workdir: Path, *, dry_run: bool = False) -> Plan:
    """Submission of the run's own config with ``overrides``, in its own folder. This process must be in ``workdir``."""
    folder = run.folder
    if not folder.config.is_file():
        raise UserError("contains no run", where=str(folder.path), remedy="start one with `rlhpc submit`")
    config = load_config(folder.config, overrides)
    _refuse_finished(folder, load_config(folder.config), config)
    return make_plan([config.model_copy(update={"run_dir": folder.path})], workdir, dry_run=dry_run)


def workdir_of(run: RunEntry) -> Path:
    """Folder that relative paths of the run's config start from; for a run on this machine, this process's own."""
    workdir = Path(run.job.workdir) if run.job and run.job.workdir else Path.cwd()
    if not workdir.is_dir():
        raise UserError(f"its working folder {str(workdir)!r} is gone", where=run.name, remedy="create it again")
    return workdir


def _refuse_finished(folder: RunFolder, before: RunConfig, after: RunConfig) -> None:
    """Raises UserError for a finished run, unless more steps are requested than before."""
    verdicts = [attempts.read_verdict(attempt) for attempt in attempts.folders(folder)]
    if not verdicts or verdicts[-1] is None or verdicts[-1].cause != "finished":
        return
    if _steps(after) <= _steps(before):
        raise UserError(
            "the run has finished",
            where=str(folder.path),
            remedy=f"request more steps, such as train.steps={max(1, 2 * before.train.steps)}",
        )


def _steps(config: RunConfig) -> int:
    return config.train.steps + (config.sft.steps if config.sft is not None else 0)
