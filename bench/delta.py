"""Deltas of bfloat16 weights after real Adam updates: bytes of a changed element, time to compute and to apply them.

    python -m bench.delta                  # a model of 27M elements, four learning rates
    python -m bench.delta --hidden 256 --updates 3

Policy-gradient updates of a random Qwen2 model in float32, whose weights are sent in bfloat16, as in training with
bfloat16 parameters and float32 main weights. Each update is encoded against the one before, as one message, on one
core. Limits, where 0.7 to 5% of the elements change: 3.3 bytes a changed element, compressed 1.8; at any rate, no more
than the weights themselves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from rlhpc.reshard.staged.delta import Data, Form, apply, checksum, encode

RATES = (3e-7, 1e-6, 1e-5, 1e-4)
LIMITS = {Form.plain: 3.3, Form.compressed: 1.8}
LIMITED = (0.006, 0.055)  # shares of changed elements at which they hold
SEQUENCES, TOKENS, GROUP = 8, 64, 4


def updates(hidden: int, rate: float, count: int) -> Iterator[Data]:
    """The weights in bfloat16, at first and after each update."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 4000, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4}
    heads = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    yield in_bfloat16(model)
    for _ in range(count):
        tokens = torch.randint(5, 4000, (SEQUENCES, TOKENS))
        rewards = torch.rand(SEQUENCES // GROUP, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).view(-1, 1)
        logprobs = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield in_bfloat16(model)


@torch.no_grad()
def in_bfloat16(model: torch.nn.Module) -> Data:
    flat = torch.cat([each.bfloat16().view(-1) for each in model.parameters()])
    return flat.view(torch.uint8).numpy()


def measure(old: Data, new: Data) -> dict[str, float]:
    """Figures of one update, times in nanoseconds an element of the model."""
    elements = len(new) // 2
    found: dict[str, float] = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = action()
        found[name] = (time.perf_counter() - began) * 1e9 / elements
        return result

    expected = timed("checksum", lambda: checksum(new))
    for form in LIMITS:
        delta = timed(f"encode {form.name}", lambda form=form: encode(new, old, form))
        if delta is None:
            found[f"full {form.name}"] = 1.0
            continue
        base = old.copy()
        timed(f"apply {form.name}", lambda delta=delta, base=base: apply(delta, base))
        if checksum(base) != expected or not np.array_equal(base, new):
            sys.exit("the delta does not make the new weights")
        found["changed"] = delta.changed / elements
        found[f"bytes {form.name}"] = len(delta.payload) / delta.changed
        found[f"full {form.name}"] = len(delta.payload) / len(new)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--updates", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(2)
    above = False
    for rate in RATES:
        old, rows = None, []
        for new in updates(options.hidden, rate, options.updates):
            if old is not None:
                rows.append(measure(old, new))
            old = new
        changed = [row["changed"] for row in rows if "changed" in row]
        print(f"learning rate {rate:g}, {len(rows)} updates of {len(old) / 2e6:.1f}M elements", end="")
        print(f", {min(changed):.1%} to {max(changed):.1%} changed" if changed else ", all larger than in full")
        for form, limit in LIMITS.items():
            sizes = [row[f"bytes {form.name}"] for row in rows if f"bytes {form.name}" in row]
            full = [row[f"full {form.name}"] for row in rows]
            encoding, applying = (_median(rows, f"{what} {form.name}") for what in ("encode", "apply"))
            print(
                f"  {form.name:<11}{min(sizes):5.2f} to {max(sizes):4.2f} bytes a changed element, "
                f"{min(full):6.2%} to {max(full):6.2%} of full; ns an element: encode {encoding:5.2f}, "
                f"apply {applying:5.2f}"
                if sizes
                else f"  {form.name:<11}in full; ns an element: encode {encoding:5.2f}"
            )
            limited = [row for row in rows if LIMITED[0] <= row.get("changed", 0) <= LIMITED[1]]
            above |= max(full) > 1 or any(row[f"bytes {form.name}"] > limit for row in limited)
        print(f"  checksum   {_median(rows, 'checksum'):.2f} ns an element")
    if above:
        sys.exit("above the limit")


def _median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median([row[name] for row in rows if name in row] or [0.0])


if __name__ == "__main__":
    main()
