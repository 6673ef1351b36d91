"""verl's published claims, measured here: one module for each claim, each prints a row of a table.

    python -m bench.claims                # all of them
    python -m bench.claims.generate       # one

``docs/measurements/claims.md`` has the results. The published figures are of GPUs and of other tasks: what can be
compared is that an effect is there, and how large it is on a given task.
"""
