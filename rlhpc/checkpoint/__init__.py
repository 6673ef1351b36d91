"""Files with weights: a run's checkpoints here, formats of model files in ``formats``.

    all ranks ─> .writing-0001/ of their attempt ─> sizes recorded, flushed ─> renamed: now it is complete

``store.py`` commits, removes and finds checkpoints; the back end writes models and optimizer. The next attempt removes
the previous one's staging folder, so that a late rank cannot commit a checkpoint. A background save is a process forked
from each rank, with the contents of memory at that time; tensors on a GPU and in pinned or shared memory are copied
first (``parallel/checkpoint_io.py``).
"""
