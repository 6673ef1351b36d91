"""Layer 5: vLLM in the rank's process, and which prompts each engine answers."""
