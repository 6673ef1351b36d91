"""All tests, in two halves at once: ``python -m tests.run [options of pytest]``.

Half of them wait, for Slurm or for a process to start, while the others compute. What the second half says is shown
after the first. The exit code is that of a half that failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAITING = ("tests/slurm", "tests/trainer", "tests/launch", "tests/rewards")


def main() -> int:
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    others = [f"--ignore={folder}" for folder in WAITING]
    with tempfile.TemporaryFile("w+") as said:
        second = subprocess.Popen([*command, *WAITING], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run([*command, "tests", *others], cwd=ROOT, check=False).returncode
            print(f"# and {', '.join(WAITING)}:", flush=True)
            second_code = second.wait()
        finally:
            second.kill()
            said.seek(0)
            sys.stdout.write(said.read())
    return code or second_code


if __name__ == "__main__":
    sys.exit(main())
