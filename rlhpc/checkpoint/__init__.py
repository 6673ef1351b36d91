"""Files with weights: a run's checkpoints here, formats of model files in ``formats``.

    all ranks ─> .writing-0001/ of their attempt ─> sizes recorded, flushed ─> renamed: a folder of that name is whole

``store.py`` names, keeps and finds checkpoints; the back end writes models and optimizer. The next attempt takes the
former one's folder away, and with it the means to finish a checkpoint. A save in the background is a process forked
from each rank, which sees what was in memory then; what is on a GPU, pinned or shared is copied before
(``parallel/saving.py``).
"""
