"""The Python sources of vLLM's CUDA wheels, run on a CPU: see CONTRIBUTING.md, "CUDA sources on a CPU"."""
