"""Writes the job scripts in rlhpc/sbatch/ from their common parts.

python -m tools.sbatch_templates
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "rlhpc" / "sbatch"
PROGRAM = "exec python -u -m rlhpc.launch.runs.direct"

Option = tuple[str, str]  # sbatch option, and its meaning here

_USAGE = """\
# Edit the options below, or pass others on the command line before this file: those take precedence. Keys that CONFIG
# leaves unset (nodes, ranks, GPUs, cores per rank) follow the job; keys that it sets must agree with the job.
# To resume a run that has ended: sbatch {again} <its run folder>/config.yaml. More: docs/slurm.md
"""
_SIZE: tuple[Option, ...] = (
    ("ntasks-per-node=8", "ranks per node, one per GPU"),
    ("gpus-per-node=8", "not --gpus-per-task: every rank must see all of them"),
    ("cpus-per-task=12", "cores per rank"),
)
_LIFE: tuple[Option, ...] = (
    ("time=24:00:00", "a longer run checkpoints before the limit, is requeued and resumes"),
    ("requeue", ""),
    ("open-mode=append", "a requeued job appends to the same log"),
    ("signal=USR2@120", "fallback: warns the ranks so many seconds before the limit"),
)
_SITE: tuple[Option, ...] = (
    ("partition=gpu", ""),
    ("account=my-project", ""),
    ("mem=0", "all memory of each node"),
    ("exclusive", ""),
)
_SETUP = """\
umask 077                                 # only you can read what the run writes
ulimit -l unlimited 2>/dev/null || true   # for memory pinned by InfiniBand
# Uses the Python of the submitting shell, unless you load another one here:
# module load cuda/13.0
# source "$HOME/miniforge3/bin/activate" my-env
"""


def script(about: str, options: str, command: str, again: str) -> str:
    """One job script; ``again``: the script that resumes its runs."""
    return f"#!/bin/bash\n{about}#\n{_USAGE.format(again=again)}\n{options}\n{_SETUP}\n{command}"


def lines(options: tuple[Option, ...], *, commented: bool = False) -> str:
    """#SBATCH lines with their meanings in a column."""
    prefix = "##SBATCH --" if commented else "#SBATCH --"
    texts = (f"{prefix + option:<36}{'# ' if meaning else ''}{meaning}" for option, meaning in options)
    return "".join(text.rstrip() + "\n" for text in texts)


def header(name: str, nodes: int, *further: Option, log: str = "%x-%j.log", size: tuple[Option, ...] = _SIZE) -> str:
    """Options of a job, or of the first group of a heterogeneous job."""
    own: tuple[Option, ...] = ((f"job-name={name}", ""), (f"nodes={nodes}", ""), *size)
    return lines((*own, *further, *_LIFE, (f"output={log}", ""))) + lines(_SITE, commented=True)


def grpo() -> str:
    about = """\
# A run on one node:
#
#   sbatch grpo.sbatch CONFIG [KEY.SUB=VALUE]...
"""
    return script(about, header("grpo", 1), f'{PROGRAM} "$@"\n', "grpo.sbatch")


def multi_node() -> str:
    about = """\
# A run on several nodes, one rank per GPU:
#
#   sbatch multi_node.sbatch CONFIG [KEY.SUB=VALUE]...
#
# For 2 to 4 nodes, as many as are free: --nodes=2-4, with slurm.nodes: [2, 4], resources.ranks_per_node and
# slurm.cpus_per_rank in CONFIG, and --mincpus=96 instead of --ntasks-per-node and --cpus-per-task, with which a
# requeued job could not restart on fewer nodes than before.
"""
    return script(about, header("multi-node", 4), f'{PROGRAM} "$@"\n', "multi_node.sbatch")


def container() -> str:
    about = """\
# The ranks run in a container, the launcher outside, where rlhpc without PyTorch is enough:
#
#   sbatch container.sbatch CONFIG [KEY.SUB=VALUE]...
#
# The image has rlhpc with all dependencies. Run folder, working folder and every path of CONFIG are mounted
# automatically, at their own paths; the home folder is not. A variable that the image sets takes precedence over one of
# this script, unless its name begins with APPTAINERENV_ (SINGULARITYENV_).
"""
    command = f"""\
container=(
    slurm.container.runtime=apptainer      # or singularity
    slurm.container.image="$HOME/images/rlhpc.sif"
    slurm.container.python=python3         # the one inside
    # slurm.container.mounts=[/scratch]
    # With Pyxis (Enroot), srun itself starts the container:
    # slurm.container.runtime=pyxis
    # slurm.container.image="$HOME/images/rlhpc.sqsh"
)
config=${{1:?CONFIG is missing}}
{PROGRAM} "$config" "${{container[@]}}" "${{@:2}}"
"""
    return script(about, header("container", 1), command, "container.sbatch")


def heterogeneous() -> str:
    about = """\
# One run on two kinds of nodes, as one heterogeneous job:
#
#   sbatch heterogeneous.sbatch CONFIG [KEY.SUB=VALUE]...
#
# The ranks of both groups form one world, numbered from group 0 to group 1, and every rank both trains and generates: a
# group for rollout alone is not supported, so the faster group waits for the slower one. The groups may differ in all
# options but --ntasks-per-node. Options on the command line apply to both.
"""
    groups = {kind: (_SIZE[0], (f"gpus-per-node={kind}:8", ""), _SIZE[2]) for kind in ("h100", "a100")}
    second = lines((("nodes=2", "the second group, with its own options"), *groups["a100"]))
    options = header("heterogeneous", 1, size=groups["h100"]) + "#SBATCH hetjob\n" + second
    return script(about, options, f'{PROGRAM} "$@"\n', "heterogeneous.sbatch")


def array() -> str:
    about = """\
# One configuration with different values, each a separate run:
#
#   sbatch --array=1-4 array.sbatch CONFIG CHANGES [KEY.SUB=VALUE]...
#
# Line N of the file CHANGES has the overrides of element N. Values must not contain blanks. For example:
#
#   actor.optimizer.learning_rate=1e-6 algorithm.kl.coefficient=0.001
#   actor.optimizer.learning_rate=3e-6 algorithm.kl.coefficient=0.001
#
# The run folder of element N is runs/<name of CONFIG>-<job id>/N.
"""
    command = f"""\
config=${{1:?CONFIG is missing}} file=${{2:?CHANGES is missing}} line=$SLURM_ARRAY_TASK_ID
read -r -a changes < <(sed -n "${{line}}p" "$file")
if [ "${{#changes[@]}}" -eq 0 ]; then
    echo "$file: line $line is missing" >&2
    exit 2
fi
run_dir=runs/$(basename "$config" .yaml)-$SLURM_ARRAY_JOB_ID/$line
{PROGRAM} "$config" "run_dir=$run_dir" "${{changes[@]}}" "${{@:3}}"
"""
    elements: Option = ("array=1-4%2", "lines of CHANGES; %2: two at a time")
    return script(about, header("array", 1, elements, log="%x-%A_%a.log"), command, "grpo.sbatch")


TEMPLATES = {
    "grpo.sbatch": grpo,
    "multi_node.sbatch": multi_node,
    "container.sbatch": container,
    "heterogeneous.sbatch": heterogeneous,
    "array.sbatch": array,
}


if __name__ == "__main__":
    for name, render in TEMPLATES.items():
        (FOLDER / name).write_text(render())
