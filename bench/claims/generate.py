"""Generation by the engine over HuggingFace's ``generate``: same model, prompts and lengths, one thread."""

from __future__ import annotations

from bench.claims.common import alternate, done, engine_of, model_of, one_thread
from bench.rollout import make_batch


def main() -> None:
    one_thread()
    import torch
    from transformers import Qwen2ForCausalLM

    from rlhpc.api import Request

    with model_of("30m") as (workload, folder):
        batch = make_batch(workload)[::2]
        longest = max(len(prompt) for prompt, _ in batch)
        engine = engine_of(folder, workload.prompt_tokens[1] + workload.max_response, max_num_seqs=len(batch))
        requests = [
            Request(prompt, seed=seed, max_tokens=length, temperature=1.0)
            for seed, (prompt, length) in enumerate(batch)
        ]
        torch.set_num_threads(1)
        model = Qwen2ForCausalLM.from_pretrained(folder).eval()
        tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt, _ in batch])
        steps = max(length for _, length in batch)

        def huggingface() -> None:
            """All of a batch until its longest response ends."""
            model.generate(
                tokens,
                attention_mask=(tokens != 0).long(),
                do_sample=True,
                top_k=0,
                min_new_tokens=steps,
                max_new_tokens=steps,
            )

        seconds = alternate({"engine": lambda: engine.generate(requests), "huggingface": huggingface}, rounds=1)
    count = sum(length for _, length in batch)
    done(
        "generation over HuggingFace's `generate`",
        "3 to 5 times",
        f"**{seconds['huggingface'] / seconds['engine']:.1f} times**: {count / seconds['engine']:,.0f} and"
        f" {count / seconds['huggingface']:,.0f} tokens/s",
        f"32M parameters, {len(batch)} responses of {count / len(batch):.0f} tokens in the mean, at most {steps}",
    )


if __name__ == "__main__":
    main()
