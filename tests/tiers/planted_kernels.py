"""Plausible faults of kernels and of the FSDP2 back end, part of those that ``tests.tiers.planted`` lists."""

from tests.tiers.fault import Fault

KERNEL_FAULTS = (
    Fault(
        "entropy-of-a-cut-vocabulary",
        "rlhpc/backends/kernels/loss_head.py",
        "entropy and its gradient mix terms of several ranks or blocks relative to different maxima",
        "(scale * (parts[:, 2] + shift * parts[:, 1])).sum(0)",
        "(scale * parts[:, 2]).sum(0)",
    ),
    Fault(
        "padding-counted-by-routers",
        "rlhpc/backends/megatron/packed.py",
        "tokens that only fill up count in the experts' auxiliary loss, biases and metrics",
        "_PADDING = -1  # in place of",
        "_PADDING = 0  # in place of",
    ),
    Fault(
        "gradients-averaged-by-fsdp",
        "rlhpc/backends/fsdp/sharded_model.py",
        "gradients of a model sharded by FSDP2 are divided by the number of ranks",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(None)",
    ),
    Fault(
        "second-half-of-stacked-experts",
        "rlhpc/backends/fsdp/stored.py",
        "the up projection of stacked experts is read from the file into the rows of the gate projection",
        "part.start[own] + box.start[dim] - part.box.start[dim]",
        "part.start[own]",
    ),
    Fault(
        "rotation-backward-forward",
        "rlhpc/backends/kernels/rotary.py",
        "gradients of queries and keys turn on instead of back",
        "return gradient * cos + torch.cat([second, -first], dim=-1)",
        "return gradient * cos + torch.cat([-second, first], dim=-1)",
    ),
    Fault(
        "sinks-of-the-first-heads",
        "rlhpc/backends/fsdp/attention_interface.py",
        "with context parallelism, every rank's heads attend with the sinks of the first rank's heads",
        "sinks = sinks.chunk(group.size())[group.rank()]",
        "sinks = sinks.chunk(group.size())[0]",
    ),
    Fault(
        "window-one-key-longer",
        "rlhpc/backends/kernels/segments.py",
        "queries attend to one key more than the sliding window has: log-probs differ from the engine's",
        "[:, :, None] - window",
        "[:, :, None] - window - 1",
    ),
    Fault(
        "context-mask-top-left",
        "rlhpc/backends/kernels/segments.py",
        "with context parallelism, queries of late chunks do not see the keys just before them",
        "last_seen = query_column + keys - queries",
        "last_seen = query_column + 0 * keys",
    ),
)
