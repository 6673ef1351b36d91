"""Training on megatron-core: implements ``TrainBackend`` for a model in a layout.

    packed batch ─> packed.py: this rank's tokens ─> model.py, layers.py: Megatron's modules on packed sequences
                 ─> head.py: log-probs and entropy of trained tokens, from hidden states ─> loss sums ─> optimizer.py

In: ``PackedBatch``; out: ``TokenStats`` of a log-prob pass, ``TrainStats`` of an update. A batch is whole on every
rank; context parallelism splits it only inside, and the results are whole again.

``parallel/offload.py`` moves whole storages to CPU memory and empties them in place, so that every view of Megatron's
buffers stays valid; the trainer decides when, and each call restores what it needs. Within an update the inputs of
recomputed layers wait there. ``adamw.py`` follows the contract of Megatron's checkpoints, and updates a share of the
parameters on the CPU. ``checkpoint.py`` saves in Megatron's torch_dist format; each rank writes its range of the
optimizer's flat buffers as boxes of whole parameters.
"""

from rlhpc.parallel.compat import end_writers  # isort: skip  first: it hides optional packages from Megatron
from rlhpc.backends.megatron.backend import MegatronBackend

__all__ = ["MegatronBackend", "end_writers"]
