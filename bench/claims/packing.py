"""Updates on packed sequences over updates on sequences padded to the longest of their microbatch."""

from __future__ import annotations

import numpy as np

from bench.claims.common import alternate, done, model_of, one_thread, sequences_of, trainer_of, update

SEQUENCES = 4  # of a microbatch


def main() -> None:
    one_thread()
    from rlhpc.data.collate import pack_batch

    with model_of("30m") as (workload, folder):
        backend, sequences = trainer_of(folder), sequences_of(workload)
        tokens = sum(len(each) - prompt for each, prompt in sequences)
        packed, padded, filling = [], [], 0
        for first in range(0, len(sequences), SEQUENCES):
            part = sequences[first : first + SEQUENCES]
            ids, longest = range(first, first + len(part)), max(len(each) for each, _ in part)
            filling += sum(longest - len(each) for each, _ in part)
            packed.append(pack_batch(part, sample_ids=ids))
            masks = [np.arange(longest - prompt) < len(each) - prompt for each, prompt in part]
            whole = [(np.pad(each, (0, longest - len(each))), prompt) for each, prompt in part]
            padded.append(pack_batch(whole, sample_ids=ids, response_mask=masks))
        seconds = alternate(
            {"packed": lambda: update(backend, packed, tokens), "padded": lambda: update(backend, padded, tokens)}
        )
    share = filling / (filling + sum(len(each) for each, _ in sequences))
    done(
        "packed sequences over padded ones",
        "+20 to 30%",
        f"**{seconds['padded'] / seconds['packed'] - 1:+.0%}**",
        f"updates of 32M parameters, {SEQUENCES} sequences a microbatch, of which {share:.0%} would be padding",
    )


if __name__ == "__main__":
    main()
