"""Alerts: rules on the metrics of a run, evaluated after each step, and events of its job.

``rules`` has rules and the engine that fires each once per episode, ``builtin`` the built-in ones, ``configured`` those
of a configuration, ``record`` writes alerts.jsonl, ``notify`` runs commands and calls webhooks. docs/watch.md lists
the built-in rules; nothing here imports torch.
"""
