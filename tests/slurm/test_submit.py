"""`rlhpc submit` and `resume` against a real Slurm: what goes in, and what becomes of it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.core import env
from tests.helpers import runs
from tests.helpers.cases import long_but
from tests.helpers.plain_model import write_inputs
from tests.helpers.waiting import PATIENCE
from tests.slurm.front import ROOT, Front
from tests.slurm.sbatch_user import CPUS, SbatchUser
from tests.slurm.scontrol import wait

pytestmark = pytest.mark.slurm


# ---- a job goes in


def test_the_script_that_is_printed_is_the_one_that_slurm_gets(front):
    words = ["slurm.nodes=[1, 2]", 'slurm.comment=it\'s "mine" 100%', "slurm.environment.A=$b c", "slurm.time=5"]
    printed = front.ok(*front.submission(*words), "--dry-run")
    assert not front.run_dir.exists(), "a dry run writes nothing"
    job = front.submit("sleep", *words)
    text, _, command = printed.partition("\n# submitted as: ")
    assert text == (front.run_dir / "submission" / f"{job}_submission.sh").read_text()
    known = front.cluster.run(["scontrol", "write", "batch_script", job, "-"], check=True).stdout
    assert text.strip() == known.strip()
    submitted = f"(cd {ROOT} && umask 077 && sbatch {front.run_dir}/submission/.submission_file_*.sh)"
    assert command.splitlines()[0] == submitted
    slurm = front.cluster.job(job)
    assert (slurm["Comment"], slurm["TimeLimit"]) == ('it\'s "mine" 100%', "00:05:00")
    assert (slurm["WorkDir"], slurm["JobName"], slurm["Requeue"]) == (str(ROOT), "tiny", "1")


def test_the_command_of_the_ranks_that_is_printed_is_the_one_that_starts_them(front):
    tools, called = front.folder / "bin", front.folder / "called"
    tools.mkdir()
    lines = ("#!/bin/sh", f'printf "%s\\n" srun "$@" >{called}.new', f"mv {called}.new {called}", "exit 1", "")
    (tools / "srun").write_text("\n".join(lines))
    (tools / "srun").chmod(0o700)
    words = ["submit", str(front.config), "slurm.gpus_per_node=0", "slurm.nodes=2", "recovery.crash=stop"]
    words.append(f"slurm.setup=['export PATH={tools}:$PATH']")
    line = front.ok(*words, "--dry-run").splitlines()[-1].removeprefix("# ranks are started as: ")
    job = front.ok(*words).split()[2].rstrip(":")
    wait(called.exists, "the supervisor has called srun")
    nodes = front.cluster.run(["scontrol", "show", "hostnames", front.cluster.job(job)["NodeList"]]).stdout.split()
    assert shlex.split(line.replace("NODE1", nodes[0]).replace("NODE2", nodes[1])) == called.read_text().splitlines()


def test_an_array_is_printed_as_it_is_submitted(front):
    configs = [str(write_inputs(front.folder / name)) for name in ("a", "b")]
    words = ["submit", "--array", *configs, "--entry", "tests.slurm.jobs:sleep", "slurm.gpus_per_node=0"]
    printed = front.ok(*words, "--dry-run").partition("\n# submitted as: ")[0]
    job = front.ok(*words).split()[2].rstrip(":").partition("_")[0]
    (script,) = (front.folder / "a" / ".arrays").glob(f"*/{job}_submission.sh")
    assert printed == script.read_text()


def test_a_submission_says_what_it_did_and_what_to_type_next(front):
    lines = front.ok(*front.submission()).splitlines()
    (job,) = front.queue()
    assert lines[0] == f"submitted job {job}: tiny"
    assert lines[1].split() == ["folder", str(front.run_dir)]
    assert "running since" in lines[2] or "queue" in lines[2]
    assert lines[3].split("  ")[-1] == f"rlhpc status {job} | rlhpc logs {job} | rlhpc cancel {job}"
    record = json.loads((front.run_dir / "job.json").read_text())
    assert (record["job_id"], record["user"], record["workdir"]) == (job, "root", str(ROOT))
    front.cluster.wait_state(job, "RUNNING")
    wait(Path(record["log"]).is_file, "the batch step's log")
    modes = {path: path.stat().st_mode & 0o077 for path in front.run_dir.rglob("*") if not path.is_symlink()}
    assert not any(modes.values()), "nothing is readable by others"
    assert front.run_dir.stat().st_mode & 0o777 == 0o700


def test_the_exit_code_of_the_program_is_the_jobs(front):
    failed, fine = front.submit("fail"), front.submit("succeed", f"run_dir={front.folder / 'other'}")
    assert front.cluster.wait_state(failed, "FAILED")["ExitCode"] == "2:0"
    assert front.cluster.wait_state(fine, "COMPLETED")["ExitCode"] == "0:0"


def test_a_setup_line_that_fails_ends_the_job_and_is_in_its_log(front):
    job = front.submit("succeed", "slurm.setup=['cd /nowhere']")
    front.cluster.wait_state(job, "FAILED")
    assert "slurm.setup: failed: cd /nowhere" in front.ok("logs", job)


# ---- the folder


def test_a_run_that_is_in_the_queue_is_not_submitted_twice(front):
    job = front.submit("sleep")
    line = front.error_line(*front.submission())
    assert line.startswith(f"run_dir: job {job} of this run is ")
    assert line.endswith(f"watch it with `rlhpc status {job}`, or end it with `rlhpc cancel {job}`")
    assert front.error_line("resume", job).startswith(f"run_dir: job {job} of this run is ")
    assert front.queue() == [job]
    assert (front.run_dir / "config.yaml").is_file(), "the run that is at work was left alone"
    front.ok("cancel", job)
    assert front.submit("sleep") != job


def test_of_two_submissions_at_once_one_is_accepted(front):
    """The other comes while the first still prepares its inputs."""
    inputs, until = front.folder / "inputs", front.folder / "until"
    hook = f"{{function: 'tests.launch.programs:prepare', arguments: {{folder: {inputs}, until: {until}}}}}"
    words = front.submission(f"prepare={hook}")
    first = front.popen(*words)
    wait(Path(f"{until}.awaited").exists, "the first prepares")
    assert front.error_line(*words).startswith("run_dir: another rlhpc is running in ")
    until.touch()
    assert first.wait(PATIENCE) == 0
    (job,) = front.queue()
    assert json.loads((front.run_dir / "job.json").read_text())["job_id"] == job


def test_a_folder_that_holds_a_run_is_not_written_over(front):
    front.cluster.wait_state(front.submit("succeed"), "COMPLETED")
    before = (front.run_dir / "config.yaml").read_text()
    line = front.error_line(*front.submission("train.steps=9"))
    assert "already contains a run; resume it with `rlhpc resume" in line
    assert (front.run_dir / "config.yaml").read_text() == before


def test_resume_continues_in_the_same_folder(front):
    first = front.submit("fail")
    front.cluster.wait_state(first, "FAILED")
    (front.run_dir / "stop-requested").touch()
    words = ["resume", "tiny", "--entry", "tests.slurm.jobs:succeed", "train.steps=4"]
    second = front.ok(*words).split()[2].rstrip(":")
    front.cluster.wait_state(second, "COMPLETED")
    assert "steps: 4" in (front.run_dir / "config.yaml").read_text()
    assert not (front.run_dir / "stop-requested").exists()
    assert "finished" in front.ok("status", "tiny")
    assert "the run has finished; request more steps" in front.error_line("resume", second)


def test_a_resume_that_slurm_refuses_leaves_the_run_as_it_was(front):
    front.cluster.wait_state(front.submit("fail"), "FAILED")
    before = {path: path.read_bytes() for path in front.run_dir.rglob("*.yaml")}
    front.error_line("resume", "tiny", "slurm.reservation=mine")
    assert {path: path.read_bytes() for path in front.run_dir.rglob("*.yaml")} == before
    assert (front.run_dir / "metrics.jsonl").is_file()


# ---- arrays


def test_an_array_runs_each_config_in_its_own_folder(front):
    configs = [write_inputs(front.folder / name) for name in ("a", "b", "c")]
    words = ["--array", *map(str, configs), "--entry", "tests.slurm.jobs:succeed", "slurm.gpus_per_node=0"]
    shown = front.ok("submit", *words, "train.steps=7")
    ids = [line.split()[2].rstrip(":") for line in shown.splitlines() if line.startswith("submitted")]
    array = ids[0].partition("_")[0]
    assert ids == [f"{array}_{index}" for index in range(3)]
    for name, job in zip("abc", ids, strict=True):
        folder = front.folder / name / "run"
        wait((folder / "report" / "report.txt").is_file, f"job {job}")
        assert json.loads((folder / "job.json").read_text())["job_id"] == job
        assert "steps: 7" in (folder / "config.yaml").read_text()
    wait(lambda: front.ok("status", array).count("finished") == 3, "all are finished")


# ---- following


def test_following_shows_progress_and_ends_with_the_run(front):
    done = front.run(*front.submission(program="succeed"), "--follow")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("rl step 3/3 | reward 0.300 | 1,000 tokens/s") for line in lines)
    assert lines[-2:] == ["the report", f"rlhpc: finished: {front.run_dir}"]


def test_following_a_run_that_fails_gives_its_code_and_cause(front):
    done = front.run(*front.submission(program="fail"), "--follow")
    assert done.returncode == 2
    assert "wrong input, or an error in the user's code (rank 1 on node1): rollout.tp: 8 is too many" in done.stderr


def test_ctrl_c_leaves_the_job_running(front):
    words = front.submission(program="work")
    process = front.popen(*words, "--follow", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (line := process.stdout.readline()).startswith("rl step 1/3"):
        assert line
    (job,) = front.queue()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert out.endswith(f"rlhpc: job {job} keeps running; cancel it with `rlhpc cancel {job}`\n")
    assert "Traceback" not in err
    assert front.cluster.job(job)["JobState"] == "RUNNING"


# ---- two users, and the whole way


def test_two_users_keep_their_runs_apart(front):
    """The same config, at the same time; neither sees into the other's folder, list of runs, or job."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    config = write_inputs(front.cluster.folder / "everybodys")  # pytest's folders are for root alone
    theirs = {}
    for user in ("alice", "bob"):
        home = front.cluster.home(user)
        words = ["/usr/bin/python3", "-m", "rlhpc.cli.main", "submit", str(config), f"run_dir={home / 'run'}"]
        words += ["--entry", "tests.slurm.jobs:sleep", "slurm.gpus_per_node=0"]
        done = front.cluster.run(words, user=user, cwd=ROOT, env={"PYTHONPATH": site})
        assert done.returncode == 0, done.stderr
        theirs[user] = (home / "run", done.stdout.split()[2].rstrip(":"))
    for user, other in (("alice", "bob"), ("bob", "alice")):
        folder, job = theirs[other]
        front.cluster.wait_state(job, "RUNNING")
        assert front.cluster.run(["ls", str(folder)], user=user).returncode != 0
        script = front.cluster.run(["scontrol", "write", "batch_script", job, "-"], user=user)
        assert (script.stdout, "Invalid user id" in script.stderr) == ("", True)
        words = ["/usr/bin/python3", "-m", "rlhpc.cli.main"]
        listed = front.cluster.run([*words, "status"], user=user, cwd=ROOT, env={"PYTHONPATH": site}).stdout
        assert len(listed.splitlines()) == 2
        assert theirs[user][1] in listed
        assert front.cluster.run([*words, "cancel", job], user=user, cwd=ROOT, env={"PYTHONPATH": site}).returncode == 2
        assert job in front.queue()


def test_inputs_are_prepared_before_the_job_waits(front):
    hook = "prepare={{function: 'tests.launch.programs:prepare', arguments: {{folder: {folder}, fail: {fail}}}}}"
    message = front.error_line(*front.submission(hook.format(folder="x", fail="user")))
    assert message == "prepare: no space; free some"
    done = front.run(*front.submission(hook.format(folder="x", fail="Oh")))
    assert (done.returncode, front.queue()) == (2, [])
    assert "RuntimeError: Oh" in done.stderr
    later = front.folder / "later"
    words = [f"model.path={later / 'model'}", f"data.train.0={later / 'train.jsonl'}"]
    front.submit("sleep", hook.format(folder=later, fail="''"), *words)
    assert (later / "model" / "config.json").is_file()


def test_a_real_run_is_saved_cancelled_and_resumed(front):
    config = runs.write_config(
        front.folder / "real", sft__steps=1, train__steps=400, slurm__nodes=2, slurm__gpus_per_node=0
    )
    folder = front.folder / "real" / "run"
    front.ok("submit", str(config))
    wait(
        lambda: any(record["phase"] == "rl" and record["step"] for record in runs.records(folder)),
        "a step",
        lambda: front.run("status", str(folder)).stdout,
        timeout=900,
    )
    front.ok("cancel", str(folder), "--save")
    wait(lambda: "stopped on request" in front.ok("status", str(folder)), "the ranks have saved", interval=1)
    saved = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    last = runs.records(folder)[-1]
    assert (last["phase"], saved) == ("rl", 1 + last["step"]), "one of the warm-up and these: not one step is lost"
    rl_steps = last["step"] + 1
    done = front.run("resume", str(folder), f"train.steps={rl_steps}", "--follow", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [(record["phase"], record["step"]) for record in runs.records(folder)]
    assert steps[-2:] == [("rl", last["step"]), ("rl", rl_steps)]
    assert len(set(steps)) == len(steps), "none was taken twice"


PROGRAM = "tests.slurm.ranks:note"
VARIABLES = {"SBATCH_EXPORT": "NONE", "SLURM_EXPORT_ENV": "NONE"}
OURS = {"HF_HUB_OFFLINE": "1", "MINE": "set by the config"}


def ranks_of(folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank-1-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("option", "variables"), long_but(("ALL",), [("ALL", VARIABLES), ("NONE", {})]))
def test_ranks_have_the_environment_of_ours(front: Front, option: str, variables: dict[str, str]) -> None:
    keys = ["slurm.gpus_per_node=0", "slurm.nodes=2", "slurm.environment.MINE=set by the config"]
    keys += [f"slurm.sbatch_options.export={option}"] if option != "ALL" else []
    entry = "tests.slurm.jobs:supervise"
    done = front.run("submit", str(front.config), "--entry", entry, *keys, env={**variables, "THEIRS": "of the shell"})
    assert done.returncode == 0, done.stdout + done.stderr
    job = done.stdout.split()[2].rstrip(":")
    front.cluster.wait_state(job, "COMPLETED")
    for rank in ranks_of(front.run_dir):
        environ = rank["environ"]
        assert {name: environ.get(name) for name in OURS} == OURS
        assert environ[env.RLHPC_STORE].partition(":")[0] == "node1"
        assert environ.get("THEIRS") == ("of the shell" if option == "ALL" else None)


@pytest.mark.long
def test_ranks_of_a_plain_script_have_it(cluster, tmp_path) -> None:
    user = SbatchUser(cluster, tmp_path)
    script = tmp_path / "mine.sh"
    path, text = user.environ["PATH"], (Path("sbatch") / "grpo.sbatch").read_text()
    script.write_text(text.replace("\nexec ", f"\nexport PATH={path} PYTHONPATH={user.environ['PYTHONPATH']}\nexec "))
    options = ("--export=NONE", "--nodes=2", "--ntasks-per-node=1", *CPUS)
    user.ended(user.sbatch(*options, script, f"--entry={PROGRAM}", user.config))
    for rank in ranks_of(user.run):
        assert rank["environ"]["HF_HUB_OFFLINE"] == "1"
