"""Batch job of a run as a plain value: sbatch's options, setup lines, the interpreter. Pure.

Options that would hide some of a node's GPUs from a rank are refused. Every rank takes the GPU of its local rank, and
vLLM asserts that it sees that many (v1/worker/gpu_worker.py: ``local_rank < device_count``), so each rank has to see
all GPUs that the job has on its node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from rlhpc.config.jobs import SlurmSection
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.redaction import hide, redact
from rlhpc.launch.slurm.commands import seconds_of

Option = str | int | bool

# File of the variables with secrets. Slurm keeps copies of the script, and may show them to administrators.
SECRETS = "environment.sh"
# Fallback for the supervisor's own deadline: ranks get USR2 this long before the time limit, or a tenth of it.
_SIGNAL_SECONDS = 120
# Options of sbatch with a key of their own.
OPTION_KEYS = {
    "nodes": "slurm.nodes",
    "time": "slurm.time",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "reservation": "slurm.reservation",
    "constraint": "slurm.constraint",
    "clusters": "slurm.cluster",
    "comment": "slurm.comment",
    "exclude": "slurm.exclude",
    "ntasks-per-node": "resources.ranks_per_node",
    "gpus-per-node": "slurm.gpus_per_node and slurm.gpu_type",
    "cpus-per-task": "slurm.cpus_per_rank",
    "mem": "slurm.memory",
    "job-name": "name",
}
# Options that would break the supervisor.
_OURS = frozenset(
    {"array", "output", "error", "input", "open-mode", "ntasks", "chdir", "wrap", "wait", "parsable", "test-only"}
)
# Options of the user by ours that they replace.
_INSTEAD = {
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "no-requeue": "requeue",
}
WHAT_WORKS = "--gpus-per-node=N or --gres=gpu:N, with --gpu-bind=none"
_BIND, _TRES_BIND = "gpu-bind", "tres-bind"
# Options that bind tasks unless --gpu-bind is given (srun(1), --gpus-per-task and --ntasks-per-gpu).
_IMPLIES_BINDING = ("gpus-per-task", "ntasks-per-gpu", "tres-per-task")
# Variables that sbatch sets from these options and srun reads.
_VARIABLES = {
    _BIND: env.SLURM_GPU_BIND,
    _TRES_BIND: env.SLURM_TRES_BIND,
    "gpus-per-task": env.SLURM_GPUS_PER_TASK,
    "ntasks-per-gpu": env.SLURM_NTASKS_PER_GPU,
    "tres-per-task": env.SLURM_TRES_PER_TASK,
}


@dataclass(frozen=True)
class JobSpec:
    """Batch job. ``options``: sbatch's by their long names, in order; True is a bare flag. ``setup``: lines of bash.
    ``secrets``: lines of the file SECRETS that ``setup`` reads; none without secrets."""

    name: str
    options: tuple[tuple[str, Option], ...]
    setup: tuple[str, ...]
    python: str
    secrets: tuple[str, ...] = field(default=(), repr=False)


def make_spec(
    config: RunConfig,
    workdir: Path,
    python: str,
    conda: str = "conda",
    submission: Path = Path("submission"),
    *,
    outlives_nodes: bool = False,
) -> JobSpec:
    """The job of ``config``. It runs in ``workdir`` with the interpreter ``python`` of this machine, or with that of
    slurm.conda, which the program ``conda`` activates. ``submission``: folder of the script and of its secrets;
    ``outlives_nodes``: the job goes on if it loses a node."""
    slurm = config.slurm
    own: dict[str, Option | None] = {
        "job-name": config.name,
        "chdir": str(workdir),
        "nodes": slurm.nodes if isinstance(slurm.nodes, int) else f"{slurm.nodes[0]}-{slurm.nodes[1]}",
        **_tasks(config),
        **_gpus(config),
        "mem": slurm.memory,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
        "clusters": slurm.cluster,
        "comment": slurm.comment,
        "exclude": ",".join(slurm.exclude) or None,
        "exclusive": slurm.exclusive or None,
        "signal": f"USR2@{_signal_seconds(slurm)}",
        "requeue": True,
        "no-kill": outlives_nodes or None,
        "kill-on-invalid-dep": "yes" if "dependency" in slurm.sbatch_options else None,
    }
    extra = _extra_options(slurm)
    _check_binding(config, {name: (str(value), f"slurm.sbatch_options.{name}") for name, value in extra.items()})
    _check_export(slurm)
    for name in extra:
        own.pop(_INSTEAD.get(name, name), None)
    if "gpu" in str(extra.get("gres", "")) or {"gpus", "gpus-per-task"} & extra.keys():
        own.pop("gpus-per-node", None)
        own.pop("gres", None)
    options = {name: value for name, value in {**own, **extra}.items() if value is not None and value is not False}
    for name, value in options.items():
        if "\n" in str(value) or "\r" in str(value):
            key = OPTION_KEYS.get(name, f"slurm.sbatch_options.{name}")
            raise UserError(f"{str(value)!r} has more than one line", where=key, remedy="write it in one line")
    job_python = "python" if slurm.conda else quote(python)
    environment, secrets = _environment(slurm, submission)
    setup = _setup(slurm, workdir, (job_python, conda), environment)
    return JobSpec(config.name, tuple(options.items()), setup, job_python, secrets)


def _tasks(config: RunConfig) -> dict[str, Option | None]:
    """Tasks and cores per node. With a range of nodes the job has no task count: Slurm would compute it at the first
    start and keep it, so that a job that ran on four nodes could not continue on two (seen on 22.05)."""
    ranks, cores = config.resources.ranks_per_node, config.slurm.cpus_per_rank
    if isinstance(config.slurm.nodes, int):
        return {"ntasks-per-node": ranks, "cpus-per-task": cores}
    return {"mincpus": ranks * (cores or 1)}


def gpus_per_node(config: RunConfig) -> int:
    """GPUs of the job on each node: one per rank by default."""
    asked = config.slurm.gpus_per_node
    return config.resources.ranks_per_node if asked is None else asked


def _gpus(config: RunConfig) -> dict[str, Option | None]:
    """The option that requests the GPUs of a node; none without them, and where Slurm does not manage them."""
    count, kind = gpus_per_node(config), config.slurm.gpu_type
    if not count or config.slurm.gpu_request == "none":
        return {}
    wanted = f"{kind}:{count}" if kind else count
    return {"gres": f"gpu:{wanted}"} if config.slurm.gpu_request == "gres" else {"gpus-per-node": wanted}


def _signal_seconds(slurm: SlurmSection) -> int:
    limit = seconds_of(slurm.time) if slurm.time is not None else None
    return _SIGNAL_SECONDS if limit is None else max(1, min(_SIGNAL_SECONDS, limit // 10))


def _extra_options(slurm: SlurmSection) -> dict[str, Option]:
    """The user's options by sbatch's names. Raises UserError for those with a key of their own, and for rlhpc's."""
    extra = {}
    for given, value in slurm.sbatch_options.items():
        name, where = given.lstrip("-").replace("_", "-"), f"slurm.sbatch_options.{given}"
        if name in OPTION_KEYS:
            raise UserError("has a key of its own", where=where, remedy=f"use {OPTION_KEYS[name]}")
        if name in _OURS:
            raise UserError("is set by rlhpc itself", where=where, remedy="leave it out")
        extra[name] = value
    return extra


def _check_export(slurm: SlurmSection) -> None:
    """Raises UserError for options of srun that keep the launcher's variables from the ranks."""
    export = parse(slurm.srun_options).get("export")
    if export is not None and "ALL" not in export.upper().split(","):
        raise UserError(
            f"--export={export} keeps variables of the launcher from the ranks",
            where="slurm.srun_options",
            remedy="leave it out, or begin it with ALL",
        )


def _environment(slurm: SlurmSection, submission: Path) -> tuple[list[str], tuple[str, ...]]:
    """Lines of the script that set slurm.environment, and those of a file that they read for secrets."""
    lines: dict[bool, list[str]] = {False: [], True: []}
    for name, value in slurm.environment.items():
        _, secret = hide(value, name)
        lines[secret is not None].append(f"export {name}={quote(value)}")
    file = submission / SECRETS
    missing = quote(f"slurm.environment: cannot read {file}")
    reading = ["# shellcheck source=/dev/null", f". {quote(str(file))} || stop_job {missing}"]
    return [*lines[False], *(reading if lines[True] else [])], tuple(lines[True])


def _setup(slurm: SlurmSection, workdir: Path, programs: tuple[str, str], environment: list[str]) -> tuple[str, ...]:
    """First lines of the batch step. One that fails ends the job and is named. ``programs``: python and conda."""
    folder, (python, conda) = quote(str(workdir)), programs
    lines = [
        "umask 077",
        'stop_job() { echo "rlhpc: $(hostname): $1" >&2; exit 1; }',
        f"cd {folder} || stop_job {quote(f'the working folder {workdir} is not there; use one that all nodes share')}",
        "ulimit -l unlimited 2>/dev/null || true",
        *_modules(slurm.modules),
        *_conda(slurm.conda, conda),
        *environment,
        *_user_lines(slurm.setup),
        f"command -v {python} >/dev/null || stop_job {quote(f'{python} is not there; use one that all nodes see')}",
    ]
    return tuple(lines)


def _modules(modules: list[str]) -> list[str]:
    """Lines that load modules. Batch shells are not login shells, so the site's start files are sourced first."""
    if not modules:
        return []
    places = '/etc/profile.d/*modules*.sh /etc/profile.d/*lmod*.sh "${LMOD_PKG:-/none}/init/bash" '
    return [
        f'for file in {places}"${{MODULESHOME:-/none}}/init/bash"; do',
        "  # shellcheck source=/dev/null",
        '  command -v module >/dev/null || ! [ -r "$file" ] || . "$file"',
        "done",
        f"command -v module >/dev/null || stop_job {quote('slurm.modules: this node has no environment modules')}",
        *(f"module load {quote(name)} || stop_job {quote(f'slurm.modules: cannot load {name}')}" for name in modules),
    ]


def _conda(environment: str | None, conda: str) -> list[str]:
    """Lines that activate the environment, after defining the shell function that only interactive shells have."""
    if environment is None:
        return []
    program = quote(conda)
    return [
        f"command -v {program} >/dev/null || stop_job {quote(f'slurm.conda: there is no {conda}')}",
        f'eval "$({program} shell.bash hook)"',
        f"conda activate {quote(environment)} || stop_job {quote(f'slurm.conda: cannot activate {environment}')}",
    ]


def _user_lines(setup: list[str]) -> list[str]:
    if not setup:
        return []
    known = all(redact(line) == line for line in setup)
    what = "$BASH_COMMAND" if known else "a line, which is not shown because there is a secret among them"
    trap = f"trap 'echo \"rlhpc: $(hostname): slurm.setup: failed: {what}\" >&2' ERR"
    return [trap, "set -e", *setup, "set +e", "trap - ERR"]


def check_job_binding(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raises UserError if ranks would not see all GPUs of their node. ``environ``: environment of a plain sbatch
    script's batch step."""
    groups = range(int(environ.get(env.SLURM_HET_SIZE, "1")))
    own = {}
    for option, variable in _VARIABLES.items():
        names = [variable, *(env.of_het_group(variable, group) for group in groups)]
        value = next((environ[name] for name in names if environ.get(name)), None)
        if value is not None:
            own[option] = (value, f"--{option}")
    _check_binding(config, own)


def _check_binding(config: RunConfig, job: Mapping[str, tuple[str, str]]) -> None:
    """Raises UserError if ranks would not see all GPUs of their node. ``job``: value and place of each of its options;
    options of srun take precedence."""
    ranks = config.resources.ranks_per_node
    if ranks == 1 or config.slurm.gpus_per_node == 0:
        return
    step = {name: (value, "slurm.srun_options") for name, value in parse(config.slurm.srun_options).items()}
    options = {**job, **step}
    name = binding_option({name: value for name, (value, _) in options.items()})
    if name is None:
        return
    value, where = options[name]
    shown = value if where.endswith(name) else f"--{name}={value}"
    raise UserError(
        f"{shown} binds each of the {ranks} ranks of a node to some of its GPUs, but vLLM needs every rank to see all",
        where=where,
        remedy=f"submit with {WHAT_WORKS}" if where.startswith("--") else f"leave it out, or use {WHAT_WORKS}",
    )


def binding_option(options: Mapping[str, str]) -> str | None:
    """Long name of the option that binds tasks to some of the GPUs; None if they see all of them."""
    bind = options.get(_BIND)
    if bind is not None:
        return None if _is_none(bind) else _BIND
    by_tres = [part for part in options.get(_TRES_BIND, "").split("+") if "gpu" in part]
    if by_tres:
        return None if all(_is_none(part.partition("gpu")[2].lstrip(":")) for part in by_tres) else _TRES_BIND
    return next((name for name in _IMPLIES_BINDING if _asks_for_gpus(name, options.get(name, ""))), None)


def _asks_for_gpus(name: str, value: str) -> bool:
    return "gpu" in value if name == "tres-per-task" else value not in ("", "0")


def _is_none(binding: str) -> bool:
    """True if the binding is none, after an optional ``verbose,`` or ``v,``."""
    kinds = [
        kind for kind in binding.lower().replace(":", ",").split(",") if kind not in ("v", "verbose", "q", "quiet")
    ]
    return kinds in ([], ["none"])


def parse(words: Sequence[str]) -> dict[str, str]:
    """Long options of a command line by name, without --: ``--name=value`` or ``--name value``."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            found[name] = value if given or following.startswith("-") else following
    return found
