"""The parts of acceptance, each run in a process of its own."""
