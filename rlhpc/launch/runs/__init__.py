"""Commands on a run: start, submit, resume, follow, report, cancel."""
