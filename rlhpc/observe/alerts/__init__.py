"""Alerts: rules on the metrics of a run, evaluated after each step, and events of its job.

``rules`` has what a rule is, ``condition`` and ``window`` its parts in the configuration, ``builtin`` the built-in
ones, ``engine`` fires each once per episode, ``record`` writes alerts.jsonl, ``notify`` runs commands and calls
webhooks. docs/watch.md lists the built-in rules; nothing here imports torch.
"""
