"""The command line, above everything else. Torch-free, and light: each command imports what it needs."""
