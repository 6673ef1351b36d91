"""Formats of model files, read from headers and metadata. Torch-free but for `safetensors_reader`."""
