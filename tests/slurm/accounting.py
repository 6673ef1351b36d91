"""The accounting database of a test cluster: mariadb and slurmdbd on the login machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.slurm.scontrol import wait

if TYPE_CHECKING:
    from tests.slurm.cluster import Cluster

ACCOUNT = "project"  # of all users
PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}
# Nothing here outlives the test: no need to wait for a disk.
CARELESS = ("--innodb-flush-method=nosync", "--innodb-log-file-size=8M")


def slurm_conf(folder: Path, host: str) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={host}",
        f"AccountingStoragePass={folder}/munge/socket",
        "AccountingStorageEnforce=associations,limits,qos",
    ]


def slurmdbd_conf(folder: Path, host: str) -> str:
    lines = [
        "DbdHost=login",
        f"DbdAddr={host}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket",
        "StorageType=accounting_storage/mysql",
        "StorageLoc=slurm_acct_db",
        "StorageUser=root",
        "StorageHost=localhost",
        f"LogFile={folder}/log/slurmdbd.log",
        f"PidFile={folder}/pids/slurmdbd",
    ]
    return "\n".join(lines) + "\n"


def start(cluster: Cluster) -> None:
    """Database, daemon, and an association forevery user with ``ACCOUNT``. Before the controller starts."""
    from tests.slurm.settings import LOGIN, USERS, address

    folder = cluster.folder
    data, socket = folder / "database", folder / "database.socket"
    options = ["--no-defaults", "--user=root", f"--datadir={data}", *CARELESS]
    make = ["mariadb-install-db", *options, "--auth-root-authentication-method=normal", "--skip-test-db"]
    cluster.run(make, cwd="/", check=True)
    serve = ["mariadbd", *options, f"--socket={socket}", "--skip-networking", "--skip-log-bin"]
    tune = ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"]
    with open(folder / "log" / "mariadbd.log", "wb") as log:
        # It ends with the login machine, as all else there.
        cluster.popen([*serve, *tune], cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    wait(socket.exists, "mariadbd", cluster.log_tail)
    conf = folder / "slurm" / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(slurmdbd_conf(folder, address(LOGIN)))
    # slurmdbd has no key for the socket's place; the database's client library reads this variable.
    cluster.run(["slurmdbd"], env={"MYSQL_UNIX_PORT": str(socket)}, cwd="/", check=True)
    wait(lambda: cluster.run(["sacctmgr", "-n", "show", "cluster"]).returncode == 0, "slurmdbd", cluster.log_tail)
    users = ["user", ",".join(["root", *USERS]), f"Account={ACCOUNT}"]
    for words in (["cluster", "test"], ["account", ACCOUNT, "Cluster=test"], users):
        cluster.run(["sacctmgr", "-i", "add", *words], check=True)
