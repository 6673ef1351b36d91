"""Process 1 of a machine of a test cluster. ``unshare … pid1.py HOST_NAME FOLDER [--lifeline] [--open FOLDER]...``

Makes the new namespaces a machine, says "ready" on stdout, then reaps orphans forever. With ``--lifeline`` stdin is a
pipe from the test process: when that ends, however it ends, the pipe breaks, and everything here ends with it.
Imports only what loads fast: every machine of every cluster starts with this.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess

MS_BIND, MS_REC = 0x1000, 0x4000
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    if LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")


def become_machine(name: str, folder: str, opened: list[str]) -> None:
    socket.sethostname(name)
    for file in os.listdir(f"{folder}/etc"):
        mount(f"{folder}/etc/{file}", f"/etc/{file}", flags=MS_BIND)
    for place in ("/dev/shm", "/mnt"):
        mount("tmpfs", place, "tmpfs", options="mode=1777")
    for place in opened:
        let_through(place)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def let_through(folder: str) -> None:
    """Let all users pass a folder that only root may enter, here and not elsewhere: its entries are mounted again on
    a folder with other permissions. New entries of root's at this level are lost with the machine."""
    old = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    mount("tmpfs", folder, "tmpfs", options="mode=711")
    for name in os.listdir(old):
        source, target = f"/proc/self/fd/{old}/{name}", f"{folder}/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
            continue
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT))
        mount(source, target, flags=MS_BIND | MS_REC)
    os.close(old)


def reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder")
    parser.add_argument("--lifeline", action="store_true")
    parser.add_argument("--open", action="append", default=[])
    options = parser.parse_args()
    become_machine(options.name, options.folder, options.open)
    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    os.dup2(2, 1)  # the log: nobody reads the pipe any longer
    if not options.lifeline:
        while True:
            signal.pause()
    os.read(0, 1)
    os.kill(-1, signal.SIGKILL)  # first: nothing may write while the folder goes
    subprocess.run(["rm", "-rf", options.folder], check=False)


main()
