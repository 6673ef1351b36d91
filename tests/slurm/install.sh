#!/usr/bin/env bash
# Installs what the Slurm tests need (Debian, Ubuntu), if it is absent and this is root. Says what it does; run it again at will.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

packages=()
need() { # program, its package
    command -v "$1" >/dev/null || packages+=("$2")
}
need slurmctld slurm-wlm
need munged munge
need ip iproute2
need nsenter util-linux
need shellcheck shellcheck
# For file systems that fail on demand.
need fusermount3 fuse3
# For the tests of containers.
need bwrap bubblewrap
# For the tests with an accounting database.
need mariadbd mariadb-server-core
need my_print_defaults mariadb-client-core
need slurmdbd slurmdbd
compgen -G '/usr/lib/*/slurm*/accounting_storage_mysql.so' >/dev/null || packages+=(slurm-wlm-mysql-plugin)

if [ ${#packages[@]} -eq 0 ]; then
    echo "slurm tests: all programs are here"
    exit
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "slurm tests: absent, and only root can install them: ${packages[*]}" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "slurm tests: absent, and there is no apt-get: install them by this system's means: ${packages[*]}" >&2
    exit 1
fi

echo "slurm tests: installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
if [ ! -e /usr/sbin/policy-rc.d ]; then
    # The tests start the daemons; without this the packages would start their own.
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
echo "slurm tests: installed"
