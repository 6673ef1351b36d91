"""Runs mutated inputs and prints a table by class.

python -m tools.mutants [--cases N] [--seed S] [--case NUMBER] [--first NUMBER] [--processes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.mutants import of_config, of_files, of_model
from tools.mutants.forked import Running, finish, start, warm_up
from tools.mutants.inputs import FAMILIES, Inputs
from tools.mutants.one_case import COMMANDS, Case, Mutation, draw
from tools.mutants.summary import Result, as_json, judged, table

# Classes of mutations, and how often each is drawn.
KINDS: dict[str, tuple[Mutation, int]] = {
    "nothing": (of_files.nothing, 1),
    "value in the file": (of_config.value_in_file, 20),
    "value on the command line": (of_config.value_on_command_line, 14),
    "value beside roles": (of_config.value_beside_roles, 8),
    "odd override": (of_config.odd_override, 6),
    "unknown key": (of_config.unknown_key, 5),
    "many unknown keys": (of_config.many_faults, 1),
    "removed key": (of_config.removed_key, 4),
    "YAML document": (of_config.document, 8),
    "site file": (of_config.site_value, 5),
    "field of config.json": (of_model.field, 12),
    "fields of config.json": (of_model.fields, 4),
    "bytes of a model file": (of_model.damaged, 8),
    "safetensors entry": (of_model.header, 5),
    "safetensors header": (of_model.whole_header, 3),
    "safetensors index": (of_model.index, 4),
    "tokenizer": (of_model.tokenizer, 5),
    "torch_dist": (of_model.checkpoint, 2),
    "data file": (of_files.data, 7),
    "Parquet": (of_files.parquet, 3),
    "state of a file": (of_files.state, 8),
    "user's module": (of_files.module, 6),
    "option": (of_files.option, 5),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Runs mutated inputs.")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this case alone and print its output")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result")
    parser.add_argument("--kind", help="only cases of this class")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.cases) if given.case is None else [given.case]
    with tempfile.TemporaryDirectory(prefix="rlhpc-mutants-") as folder:
        os.chmod(folder, 0o755)
        results = [*run(Path(folder), given.seed, numbers, given.processes, given.kind)]
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(results), indent=1))
    if given.case is not None:
        print(results[0].text)
    print("\n".join(table(results)))
    return int(any(result.faults for result in results))


def run(
    folder: Path, seed: int, numbers: range | list[int], processes: int, kind: str | None = None
) -> Iterator[Result]:
    """The results of the cases, in their order."""
    inputs = Inputs(folder / "inputs")
    inputs.copy(folder / "warm", "qwen2")
    warm_up([[word.format(config="config.yaml") for word in words] for words in COMMANDS.values()], folder / "warm")
    gc.collect()
    gc.freeze()  # forked processes do not copy what they only look at
    running: dict[int, tuple[Case, Running]] = {}
    done: dict[int, Result] = {}
    wanted = [number for number in numbers if kind is None or drawn(seed, number, folder).kind == kind]
    for number in wanted:
        if len(running) >= processes:
            _wait(running, done)
        case = drawn(seed, number, folder)
        case.folder.parent.mkdir(exist_ok=True)
        inputs.copy(case.folder, case.family)
        KINDS[case.kind][0](case)
        _open_to_all(case.folder)
        started = start(case.words, case.folder, unprivileged=True)
        running[started.pid] = case, started
    while running:
        _wait(running, done)
    yield from (done[number] for number in wanted)


def drawn(seed: int, number: int, folder: Path) -> Case:
    """A case with its class, not yet mutated."""
    case = draw(seed, number, folder / "cases" / str(number), [*FAMILIES])
    (case.kind,) = case.rng.choices([*KINDS], [share for _, share in KINDS.values()])
    return case


def _open_to_all(folder: Path) -> None:
    """The folder of a case belongs to whom the command runs as."""
    from tools.mutants.forked import NOBODY

    if os.getuid() == 0:
        for above, _, names in os.walk(folder):
            for path in (above, *(os.path.join(above, name) for name in names)):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def _wait(running: dict[int, tuple[Case, Running]], done: dict[int, Result]) -> None:
    pid, status, usage = os.wait4(-1, 0)
    case, started = running.pop(pid)
    done[case.number] = judged(case, finish(started, status, usage))
    of_files.clean(case, case.folder)


if __name__ == "__main__":
    sys.exit(main())
