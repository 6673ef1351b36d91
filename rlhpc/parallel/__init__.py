"""Joining the ranks, and what stands between Megatron and the machine."""
