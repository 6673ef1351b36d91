"""Training on megatron-core: ``TrainBackend`` of a model in a layout.

    packed batch ─> context.py: this rank's tokens ─> model.py, layers.py: Megatron's modules on packed sequences
                 ─> log_probs.py: vocabulary-parallel log-probs and entropy ─> loss sums ─> optimizer.py

In: ``PackedBatch``; out: ``TokenStats`` of a log-prob pass, ``TrainStats`` of an update. A batch is whole on every
rank; only inside is it cut by context parallelism, and what comes out is whole again.

``offload.py`` moves whole storages to CPU memory and empties them in place, so that every view of Megatron's buffers
stays valid; a weight sync says when to let go, and the back end brings back what a call needs. ``adamw.py`` keeps the
contract that Megatron's checkpoints are written for, and updates a share of the parameters on the CPU.
``checkpoint.py`` saves in Megatron's torch_dist format; of the optimizer each rank writes the range of a flat buffer
that it keeps, as boxes of whole parameters (``optimizer_shards.py``).
"""

from rlhpc.parallel.compat import end_writers  # isort: skip  first: it hides optional packages from Megatron
from rlhpc.backends.megatron.backend import MegatronBackend

__all__ = ["MegatronBackend", "end_writers"]
