"""Layer 4: joining the ranks, and what stands between Megatron and the machine."""
