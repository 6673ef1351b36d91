"""Makes or checks the lock files in requirements/: exact versions with SHA-256 hashes.

    python -m tools.locks [--upgrade] [--vllm VERSION]    # make locks: uv resolves against PyPI
    python -m tools.locks --check                         # part of make check: no network

Versions that still fit are kept. ``--upgrade`` takes the newest, ``--vllm`` another release of vLLM for gpu.lock.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.core.errors import EXIT_USER_ERROR, UserError, one_line
from tools.lock_files import ENGINE, FOLDER, LOCKS, TORCH_CPU, TORCH_CUDA, Lock, Pin, parse, problems, read

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_CUDA = ("cuda-", "nvidia-")  # names of the packages that only torch's CUDA build needs
_LOGIN, _CPU, _GPU = LOCKS

_MADE = "# Made by `make locks`; not edited by hand. pip refuses a file with another hash.\n"
_HEADS = {
    _LOGIN.file: """\
# What a login node needs that checks, plans, submits and watches, and setuptools to build rlhpc:
#   pip install --require-hashes --no-deps -r requirements/login.lock
#   pip install --no-deps --no-build-isolation .
""",
    _CPU.file: f"""\
# What a machine without a GPU needs for tests, demo and CI, and setuptools to build rlhpc:
#   pip install --require-hashes --no-deps -r requirements/cpu.lock
#   pip install --no-deps --no-build-isolation -e .
# torch has hashes of two builds of its version: the wheels of PyPI (CUDA), and the +cpu wheels of PyTorch's CPU index,
# which {TORCH_CPU} lists. This lock therefore works with either index; PyPI's build also needs {TORCH_CUDA}.
# The packages of {ENGINE} come last: most of their declared dependencies are not installed, hence --no-deps.
""",
    _GPU.file: """\
# What a GPU site needs, for one release of vLLM; `make locks ARGS='--vllm VERSION'` makes it for another:
#   pip install --require-hashes --no-deps -r requirements/gpu.lock
#   pip install --no-deps --no-build-isolation .
# Made from the metadata of these packages: no GPU machine has installed this file.
""",
    TORCH_CUDA: """\
# CUDA libraries that {torch} from PyPI needs besides cpu.lock. Not for the +cpu wheels.
#   pip install --require-hashes --no-deps -r requirements/torch-cuda.lock
""",
    TORCH_CPU: f"""\
# The +cpu wheels of torch in {CPU_INDEX}. `make locks` copies their hashes to cpu.lock.
""",
}


@dataclass(frozen=True)
class Uv:
    """The resolver: its program, the project, and the oldest Python that the locks are for."""

    program: str
    root: Path
    python: str

    def compile(
        self,
        sources: Sequence[str],
        lines: Iterable[str] = (),
        *,
        seed: Iterable[Pin] = (),
        options: Sequence[str] = (),
    ) -> str:
        """Lock of the requirements in ``sources`` and ``lines``, for all platforms. Versions of ``seed`` are preferred.

        The seed has no hashes: uv would copy them instead of reading those of the index.
        """
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made.lock"
            made.write_text("".join(f"{pin.line}\n" for pin in seed), encoding="utf-8")
            command = [self.program, "pip", "compile", *sources, "-", "--universal", f"--python-version={self.python}"]
            command += [
                "--generate-hashes",
                "--only-binary=:all:",
                "--emit-build-options",
                "--no-header",
                "--no-config",
            ]
            done = subprocess.run(
                [*command, "--quiet", f"--output-file={made}", *options],
                cwd=self.root, input="\n".join(lines), capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                raise UserError(one_line(done.stderr) or f"uv: exit code {done.returncode}", where="make locks")
            return made.read_text(encoding="utf-8")


def find_uv() -> str:
    """uv of this environment, or else the one in PATH."""
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        raise UserError("uv is missing, and it resolves the requirements", remedy="pip install uv")
    return found


def make(root: Path, *, upgrade: bool, vllm: str) -> None:
    """Write all lock files."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    uv = Uv(find_uv(), root, pyproject["project"]["requires-python"].removeprefix(">="))
    build = pyproject["build-system"]["requires"]

    def seed(file: str) -> list[Pin]:
        return [] if upgrade else read(root, file)

    def extras(lock: Lock) -> list[str]:
        return [f"--extra={extra}" for extra in lock.extras]

    torch = next(f"{line}" for line in _CPU.asked(root) if line.name == "torch")
    builds = cpu_builds(uv, torch)
    with_cuda = parse(uv.compile([], [torch], seed=[*seed(_CPU.file), *seed(TORCH_CUDA)]))
    cuda = [pin.name for pin in with_cuda if pin.name.startswith(_CUDA)]
    others = [f"--no-emit-package={pin.name}" for pin in with_cuda if pin.name not in cuda]
    libraries = uv.compile([], [torch], seed=with_cuda, options=others)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as excluded:
        excluded.write("\n".join(cuda))
        excluded.flush()
        options = [*extras(_CPU), f"--excludes={excluded.name}"]
        cpu = uv.compile(["pyproject.toml"], build, seed=seed(_CPU.file), options=options)
    engine = uv.compile([f"{FOLDER}/{ENGINE}"], seed=seed(_CPU.file), options=["--no-deps"])
    hashes = [digest for pin in parse(builds) for digest in pin.hashes]
    cpu = with_hashes(cpu, "torch", hashes) + _without_options(engine)
    login = uv.compile(["pyproject.toml"], build, seed=parse(cpu))
    release = [f"vllm=={vllm}"] if vllm else []
    gpu = uv.compile(["pyproject.toml"], [*build, *release], seed=seed(_GPU.file), options=extras(_GPU))
    made = {_LOGIN.file: login, _CPU.file: cpu, _GPU.file: gpu, TORCH_CUDA: libraries, TORCH_CPU: builds}
    for file, text in made.items():
        head = _MADE + _HEADS[file].format(torch=torch)
        (root / FOLDER / file).write_text(head + text, encoding="utf-8")
        print(f"{FOLDER}/{file}: {len(parse(text))} packages")


def cpu_builds(uv: Uv, torch: str) -> str:
    """torch's +cpu wheels in PyTorch's CPU index; if that does not answer, those known already for this version."""
    try:
        return uv.compile([], [f"{torch}+cpu"], options=["--no-deps", f"--default-index={CPU_INDEX}"])
    except UserError as error:
        known = read(uv.root, TORCH_CPU)
        if [pin.line for pin in known] != [f"{torch}+cpu"]:
            raise UserError(
                f"no hashes of {torch}+cpu: {error.message}",
                where=f"{FOLDER}/{TORCH_CPU}",
                remedy=f"run `make locks` where {CPU_INDEX} can be reached",
            ) from None
        print(f"{CPU_INDEX} does not answer: {FOLDER}/{TORCH_CPU} is kept", file=sys.stderr)
        text = (uv.root / FOLDER / TORCH_CPU).read_text(encoding="utf-8")
        return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def with_hashes(text: str, name: str, hashes: Sequence[str]) -> str:
    """The lock with further hashes of a package, before its others."""
    lines = []
    for line in text.splitlines(keepends=True):
        lines.append(line)
        if line.startswith(f"{name}=="):
            lines += [f"    --hash=sha256:{digest} \\\n" for digest in hashes]
    return "".join(lines)


def _without_options(text: str) -> str:
    """The lock without options of pip, which the file has already."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("--"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.locks", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only report what is wrong with the lock files")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that are allowed")
    parser.add_argument("--vllm", default="", metavar="VERSION", help="release of vLLM for gpu.lock")
    options = parser.parse_args(arguments)
    try:
        if not options.check:
            make(ROOT, upgrade=options.upgrade, vllm=options.vllm)
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    found = problems(ROOT)
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
