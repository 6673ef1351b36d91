"""Which tests run when: tiers and their budgets, the table of durations, slices for CI, and what a change can reach."""
