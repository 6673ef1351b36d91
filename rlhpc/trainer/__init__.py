"""Layer 6: the composition root, the step, the loop, and a rank's main."""
