"""Process groups and transfers between ranks, pinned memory, and all changes to Megatron's and vLLM's state."""
