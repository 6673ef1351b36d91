"""sbatch's words, as real ones printed them, become one line with the key at fault. No Slurm is asked here."""

import pytest

from rlhpc.config.jobs import SlurmSection
from rlhpc.launch.slurm.executor import submission_error

SLURM = SlurmSection(partition="gpu", account="proj", qos="high", time="9-0", memory="9T", reservation="r", nodes=9)
FAILED = "sbatch: error: Batch job submission failed: "


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("said", "key", "expected"),
    [
        ("sbatch: error: invalid partition specified: gpu\n" + FAILED + "Invalid partition name specified",
         "slurm.partition", "no partition 'gpu'"),
        (FAILED + "Invalid account or account/partition combination specified", "slurm.account", "account 'proj' is"),
        (FAILED + "Invalid qos specification", "slurm.qos", "QoS 'high' is unknown, or not available to you"),
        (FAILED + "Requested node configuration is not available", "slurm", "gpu has the requested resources"),
        ("sbatch: error: Memory specification can not be satisfied\n" + FAILED
         + "Requested node configuration is not available", "slurm.memory", "no node has that much memory: 9T"),
        ("sbatch: error: Invalid generic resource (gres) specification", "slurm.gpus_per_node", "no such GPUs"),
        ("sbatch: error: Invalid --time specification", "slurm.time", "9-0 is longer than allowed"),
        (FAILED + "Requested time limit is invalid (missing or exceeds some limit)", "slurm.time", "9-0 is longer"),
        (FAILED + "Requested reservation is invalid", "slurm.reservation", "no reservation 'r'"),
        (FAILED + "Invalid feature specification", "slurm.constraint", "no node has the features"),
        (FAILED + "Invalid node name specified", "slurm.exclude", "unknown node"),
        (FAILED + "Invalid license specification", "slurm.sbatch_options.licenses", "no such license"),
        (FAILED + "Node count specification invalid", "slurm.nodes", "9 nodes are not allowed here"),
        ("sbatch: error: Invalid --mail-type specification", "slurm.sbatch_options.mail-type", "this value of --mail"),
        ("sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information",
         "slurm.sbatch_options", "no option 'bogus'"),
        (FAILED + "Unable to contact slurm controller (connect failure)", "slurm", "the controller does not answer"),
        (FAILED + "Socket timed out on send/recv operation", "slurm", "the controller does not answer"),
        ('sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory '
         "(Did you start munged?)\n" + FAILED + "Protocol authentication error", "", "munge, Slurm's"),
        (FAILED + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
         "slurm", "do not allow this job (Job violates"),
        (FAILED + "User's group not permitted to use this partition", "slurm.partition", "no access to partition gpu"),
        (FAILED + "Something of the future\n", "slurm", "sbatch refused the job: Something of the future"),
        ("", "slurm", "sbatch refused the job: no message from sbatch"),
    ],
)  # fmt: skip
def test_what_sbatch_says(said, key, expected):
    error = submission_error(said, SLURM)
    assert expected in error.message
    assert error.where == key or not key
    assert error.remedy
    assert "\n" not in str(error)
