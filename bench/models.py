"""Makes the benchmark's models: random weights whose responses end after a ragged number of tokens.

A randomly initialized model almost never samples its end token. Here every embedding has a common component along
one direction, which the residual stream carries to the head; the head's row of the end token points along it, scaled so
that a sampled token is the end token with the workload's probability.

    python -m bench.models tiny /tmp/models/tiny
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    model, tokenizer = build_model(workload), build_tokenizer(workload)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    print(f"{workload.name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters in {arguments.folder}")


if __name__ == "__main__":
    main()
