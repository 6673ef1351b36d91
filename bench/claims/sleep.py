"""Memory that an engine returns when it sleeps."""

from __future__ import annotations

from bench.claims.common import GIB, done, engine_of, model_of, one_thread, resident

SEQUENCES, PROMPT, RESPONSE = 64, 448, 64


def main() -> None:
    one_thread()
    from safetensors.torch import load_file

    from rlhpc.api import Request

    with model_of("30m") as (_, folder):
        engine = engine_of(folder, PROMPT + RESPONSE, max_num_seqs=SEQUENCES, prefix_caching=False)
        for _ in range(2):  # once for what the first time allocates
            engine.sleep()
            asleep = resident()
            engine.wake_weights()
            engine.load_weights(iter(load_file(folder / "model.safetensors").items()))
            engine.wake_cache()
            engine.generate([Request((5,) * PROMPT, seed, RESPONSE, 1.0) for seed in range(SEQUENCES)])
            awake = resident()
        engine.sleep()
        freed, held = awake - resident(), awake - asleep
    done(
        "memory that a sleeping engine returns",
        "weights and KV cache",
        f"**{freed / held:.0%}** of what it took awake: {freed / GIB:.2f} of {held / GIB:.2f} GiB",
        "32M parameters in float32, and 0.5 GiB of cache in use",
    )


if __name__ == "__main__":
    main()
