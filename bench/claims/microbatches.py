"""Microbatches filled with tokens over microbatches of as many sequences as always fit."""

from __future__ import annotations

from bench.claims.common import alternate, done, model_of, one_thread, sequences_of, trainer_of, update

CAPACITY = 2_048  # tokens of a microbatch


def main() -> None:
    one_thread()
    from rlhpc.data.collate import pack_batch
    from rlhpc.data.packing import pack

    with model_of("30m") as (workload, folder):
        backend, sequences = trainer_of(folder), sequences_of(workload)
        tokens = sum(len(each) - prompt for each, prompt in sequences)
        count = CAPACITY // (workload.prompt_tokens[1] + workload.max_response)
        (plan,) = pack([len(each) for each, _ in sequences], 1, CAPACITY)

        def batches(groups: list[list[int]]) -> list[object]:
            return [pack_batch([sequences[i] for i in group], sample_ids=list(group)) for group in groups]

        ids = list(range(len(sequences)))
        filled = batches([list(members) for members in plan.bins[0]])
        fixed = batches([ids[first : first + count] for first in range(0, len(ids), count)])
        seconds = alternate(
            {"filled": lambda: update(backend, filled, tokens), "fixed": lambda: update(backend, fixed, tokens)}
        )
    done(
        "microbatches by tokens over a fixed number of sequences",
        "+50 to 100%",
        f"**{seconds['fixed'] / seconds['filled'] - 1:+.0%}**: {len(filled)} microbatches for {len(fixed)}",
        f"updates of 32M parameters, packed, {CAPACITY:,} tokens or {count} sequences a microbatch; on a CPU small"
        " microbatches cost hardly more",
    )


if __name__ == "__main__":
    main()
