"""Formats of model files, read from headers and metadata. Torch-free except `safetensors_reader`."""
