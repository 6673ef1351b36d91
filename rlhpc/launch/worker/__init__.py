"""A rank's process around the trainer, and the check of its node."""
