"""Training on PyTorch's FSDP2: implements ``TrainBackend`` for any causal language model of transformers.

    packed batch ─> documents.py: this rank's tokens ─> transformers' modules, attention by attention_interface.py
                 ─> policy_head.py: log-probs and entropy of trained tokens ─> loss sums ─> clipping.py ─> optimizers.py

``sharded_model.py`` builds the model without memory and shards it; ``stored.py`` and ``weight_shards.py`` read and
write it by HuggingFace's names, block by block.
"""
