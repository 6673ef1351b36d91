"""Layer 0: errors, environment variables, serialisation. Imports nothing of rlhpc."""
