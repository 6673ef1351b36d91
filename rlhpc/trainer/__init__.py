"""The composition root, the loop, the step, and a rank's main.

    build.py, models.py ─> Run ─> loop.py ─> step.py: weight sync, sampling, advantages, updates

Each model is a ``Role`` (``roles.py``) with a layout of its own, so results pass between models by sample
(``parallel/transfer.py``). ``skipped.py`` makes each update: one whose gradient norm is not finite is skipped, written
and counted, and too many in a row end the run; ``replay.py`` repeats such an update.
"""
