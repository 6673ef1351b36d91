"""Selection of tests: tiers and their budgets, durations, slices for CI, and tests that a change can reach."""
