#!/usr/bin/env bash
# Installs the browser for the tests of the page (Debian, Ubuntu), if it is absent and this is root.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        echo "tests of the page: $name is here"
        exit
    fi
done
if [ "$(id -u)" -ne 0 ]; then
    echo "tests of the page: chromium is absent, and only root can install it" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "tests of the page: chromium is absent, and there is no apt-get: install it by this system's means" >&2
    exit 1
fi

echo "tests of the page: installing chromium"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium >/dev/null
echo "tests of the page: installed"
