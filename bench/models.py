"""Makes the benchmark's models: random weights whose responses end after a ragged number of tokens.

A randomly initialized model almost never samples its end token. Here every embedding has a common component along
one direction, which the residual stream carries to the head; the head's row of the end token points along it, scaled so
that a sampled token is the end token with the workload's probability.

    python -m bench.models tiny /tmp/models/tiny --measure 2
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from bench.workload import SEED, WORKLOADS, Vocabulary, Workload

PAD, EOS = 0, 1
CALIBRATION_ROUNDS = 4


def save_random_model(folder: Path, **sizes: int) -> int:
    """Writes a random Qwen2 model in float32 with an untied head; returns its bytes."""
    torch.manual_seed(SEED)
    config = Qwen2Config(**sizes, tie_word_embeddings=False)
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def build_tokenizer(workload: Workload) -> Qwen2Tokenizer:
    """Tokenizer with one token per word."""
    vocabulary = Vocabulary(workload.vocab)
    return Qwen2Tokenizer(
        vocab=vocabulary.ids,
        merges=vocabulary.merges,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def build_model(workload: Workload) -> Qwen2ForCausalLM:
    """Random model in float32 with a calibrated end token."""
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=workload.vocab,
        hidden_size=workload.hidden,
        intermediate_size=workload.ffn,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    direction = torch.randn(workload.hidden)
    direction /= direction.norm()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.normal_().add_(math.sqrt(workload.hidden) * direction)
        head = model.get_output_embeddings().weight
        head[PAD].copy_(-direction)  # never sample padding, which would count as the end of a response
        head[EOS].copy_(calibrate(model, workload, direction) * direction)
    return model


def calibrate(model: Qwen2ForCausalLM, workload: Workload, direction: torch.Tensor) -> float:
    """Norm of the end token's head row for which its mean probability is the workload's hazard.

    Measured on random instead of sampled tokens, since the head is nearly uniform.
    """
    head = model.get_output_embeddings().weight
    tokens = torch.randint(3, workload.vocab, (32, min(workload.max_response, 128)))
    states = model.model(tokens).last_hidden_state.flatten(0, 1)
    logits = states @ head.T
    logits[:, EOS] = -torch.inf
    others, along = logits.logsumexp(-1), states @ direction
    odds = math.log(workload.hazard / (1 - workload.hazard))
    scale = ((others + odds).mean() / along.mean()).item()
    for _ in range(CALIBRATION_ROUNDS):
        mean = torch.sigmoid(scale * along - others).mean().item()
        scale += (math.log(workload.hazard) - math.log(mean)) / along.mean().item()
    return scale


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, workload: Workload, batches: int) -> list[int]:
    """Sorted lengths of responses sampled at temperature 1, including the end token."""
    torch.manual_seed(SEED)
    prompts = workload.prompts(workload.prompts_per_step * batches)
    lengths = []
    for start in range(0, len(prompts), workload.prompts_per_step):
        inputs = tokenizer(prompts[start : start + workload.prompts_per_step], padding=True, return_tensors="pt")
        output = model.generate(
            inputs.input_ids.repeat_interleave(workload.samples_per_prompt, 0),
            attention_mask=inputs.attention_mask.repeat_interleave(workload.samples_per_prompt, 0),
            max_new_tokens=workload.max_response,
            do_sample=True,
            top_k=0,
        )[:, inputs.input_ids.shape[1] :]
        ended = (output == EOS).int()
        lengths += torch.where(ended.any(1), ended.argmax(1) + 1, output.shape[1]).tolist()
    return sorted(lengths)


def summary(lengths: list[int], workload: Workload) -> str:
    """One line on the distribution, compared with that of a constant hazard."""
    count, top = len(lengths), workload.max_response
    quartiles = [lengths[count * k // 4] for k in (1, 2, 3)]
    stay = 1 - workload.hazard
    return (
        f"{workload.name}: {count} responses, mean {sum(lengths) / count:.1f} tokens, quartiles {quartiles}, "
        f"longest {lengths[-1]}, {sum(n == top for n in lengths) / count:.1%} at {top}; "
        f"constant hazard: mean {(1 - stay**top) / workload.hazard:.1f}, {stay ** (top - 1):.1%} at {top}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--measure", type=int, metavar="BATCHES", help="sample responses of so many steps and report their lengths"
    )
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    model, tokenizer = build_model(workload), build_tokenizer(workload)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    print(f"{workload.name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters in {arguments.folder}")
    if arguments.measure:
        print(summary(measure(model, tokenizer, workload, arguments.measure), workload))


if __name__ == "__main__":
    main()
