"""Says how the installed vLLM serves an architecture: ``python -m rlhpc.rollout.served ARCHITECTURE``.

A program of its own: it imports vLLM, which ``plan.checks.served`` must not.
"""

from __future__ import annotations

import sys


def served_by(architecture: str) -> str:
    """``native``: by vLLM's own model; ``transformers``: by its Transformers back end; ``no``: not at all. As vLLM
    resolves it (model_executor/models/registry.py, resolve_model_cls)."""
    import transformers
    from vllm.model_executor.models import ModelRegistry

    found = ModelRegistry.models.get(architecture)
    if found is not None:
        return "transformers" if getattr(found, "module_name", "").endswith(".transformers") else "native"
    model = getattr(transformers, architecture, None)
    if model is not None and (model.is_backend_compatible() or model._can_set_attn_implementation()):
        return "transformers"
    return "no"


if __name__ == "__main__":
    print(served_by(sys.argv[1]))
