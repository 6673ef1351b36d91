"""Benchmarks. Run as modules from the repository root: ``python -m bench.grpo_step``."""
