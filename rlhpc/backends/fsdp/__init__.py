"""Training back end on transformers' models, sharded by PyTorch's FSDP2."""
