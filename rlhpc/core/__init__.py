"""Errors, environment variables, serialisation. Imports nothing of rlhpc."""
