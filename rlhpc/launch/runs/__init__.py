"""Commands on a run: run, submit, resume, follow, status, logs, cancel."""
