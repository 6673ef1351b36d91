"""The composition root, the loop, the step, and a rank's main.

    build.py, models.py ─> Run ─> loop.py ─> step.py: weight sync, sampling, advantages, updates
                                               ├─> sampling.py ─> rollout.py (engine), reward_model.py
                                               ├─> advantages.py ─> log-prob passes of all models
                                               └─> update.py ─> batches.py ─> skipped.py: TrainBackend.train

``Run`` is known to the loop and the step; what they call takes the parts that it uses. Each model is a ``Role``
(``roles.py``) with a layout of its own, so results pass between models by sample (``parallel/transfer.py``). An update
whose gradient norm is not finite, or a spike (``spikes.py``), is skipped, repeated to find its cause, written and
counted, and too many in a row end the run (``skipped.py``).
"""
