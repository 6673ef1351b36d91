"""All changes to Megatron's (0.16.1), vLLM's and PyTorch's own state, each with its reason and the upstream line.

Nothing else in this package assigns to a module or object of theirs, or calls Megatron's setters of global state. On
a machine with a GPU ``megatron_device`` does nothing; elsewhere, within it, Megatron's unconditional CUDA calls run on
the CPU (``cpu_stand_ins.py``).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.checkpoint.formats.torch_dist_metadata import Index
from rlhpc.core.errors import UserError
from rlhpc.parallel import cpu_stand_ins
from rlhpc.parallel.checkpoint_io import RestrictedLoad, patient_stand_ins
from rlhpc.parallel.store import group_timeout, opened, seal, timeout_seconds
from rlhpc.sharding.layout import ParallelLayout

_NOTED = "_classes_to_compile"

# Optional packages that Megatron imports, by the names it uses; NVIDIA's images have most of them.
EXTENSIONS = frozenset(
    {
        "amp_C",
        "apex",
        "deep_ep",
        "emerging_optimizers",
        "fast_hadamard_transform",
        "flash_attn",
        "flash_attn_3",
        "flash_mla",
        "flashattn_hopper",
        "fused_weight_gradient_mlp_cuda",
        "transformer_engine",
        "transformer_engine_torch",
    }
)

MegatronGlobals = dict[str, Any]

# Methods of a process group that run a collective.
_COLLECTIVES = re.compile(r"_?(all_?(reduce|gather|to_?all)|reduce|broadcast|gather|scatter|barrier|end_coalesc).*")


def _note_class(model: Any, cls: type, **options: Any) -> None:
    """Notes that instances of ``cls`` in vLLM's ``model`` are to be compiled, with options of support_torch_compile."""
    model.__dict__.setdefault(_NOTED, {})[cls] = options


def _replacing_classes(then: Callable[[Any], None]) -> Callable[[Any], None]:
    """``then``, after modules of vLLM's model of a noted class have become instances of a subclass that is compiled."""

    @functools.wraps(then)
    def replace(model: Any) -> None:
        classes = {cls: _compiled_class(cls, options) for cls, options in model.__dict__.pop(_NOTED, {}).items()}
        for module in model.model.modules():
            if (compiled := classes.get(type(module))) is not None:
                module.__class__ = compiled
                compiled.__init__(module, vllm_config=model.vllm_config)
        then(model)

    return replace


def _compiled_class(cls: type, options: dict[str, Any]) -> Any:
    """A subclass whose initialization adds what vLLM needs, to a module that is already built."""
    from vllm.compilation.decorators import support_torch_compile

    own = type(cls.__name__, (cls,), {"__init__": lambda module: None, "__module__": cls.__module__})
    return support_torch_compile(**options)(own)


def device() -> torch.device:
    """Device of this rank's tensors: the GPU that the rank has selected, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else cpu_stand_ins.CPU


@functools.cache
def hide_extensions() -> None:
    """Hides Megatron's optional packages from it, in any image. Called before anything imports Megatron.

    Each changes what runs: FusedAdam and the owner of the master weights (optimizer/__init__.py:12,
    distrib_optimizer.py:20), norm and clipping of gradients (clip_grads.py:10, optimizer.py:16), the router's product
    (moe_utils.py:1192), the RNG tracker (random.py:366/434), fp8 tensors in checkpoints (strategies/torch.py:66),
    weight gradients (layers.py:45), attention (attention.py:60-115), norms (fused_layer_norm.py:15,
    transformer_block.py:37). rlhpc brings its own modules for these. Builds that do not match the installed PyTorch
    also fail with errors other than ImportError, which Megatron does not expect. rlhpc itself uses flash-attn
    (backends/kernels/packed_attention.py).
    """
    import_ = builtins.__import__

    def find(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        hidden = level == 0 and name.partition(".")[0] in EXTENSIONS
        if hidden and str((globals or {}).get("__name__", "")).startswith("megatron."):
            raise ModuleNotFoundError(f"{name} is hidden from Megatron", name=name)
        return import_(name, globals, locals, fromlist, level)

    builtins.__import__ = find


hide_extensions()


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Runs megatron-core on this rank's device within it. No effect with a GPU; may be nested."""
    if torch.cuda.is_available() or cpu_stand_ins.CpuForCuda.active:
        yield
        return
    with _replaced(_stand_ins()), cpu_stand_ins.CpuForCuda():
        yield


def _stand_ins() -> list[tuple[Any, str, Any]]:
    """(module, name, value while Megatron runs)."""
    from megatron.core.tensor_parallel import random

    return [
        *((torch.cuda, *item) for item in cpu_stand_ins.CUDA_FUNCTIONS.items()),
        *((random, *item) for item in cpu_stand_ins.RNG_FUNCTIONS.items()),
        *((dist, *item) for item in cpu_stand_ins.UNEVEN_COLLECTIVES.items()),
    ]


@contextlib.contextmanager
def _replaced(stand_ins: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets attributes of modules and classes within it, and restores them as they were defined."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in stand_ins]
    try:
        for owner, name, stand_in in stand_ins:
            setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def adopt_optimizer(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Makes Megatron build ``make(params=groups, lr=…, betas=…, …)``, which keeps ``step`` in its parameter groups, in
    place of the FusedAdam that it would import (optimizer/__init__.py:357).

    Megatron's path for torch.optim.AdamW breaks on checkpoints (distrib_optimizer.py:642 asserts one step, :940 misses
    the key, :818-822 alias one step tensor so that Adam advances once per parameter after a resume); its check of the
    class (:515) accepts no others.
    """
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = make, False
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = torch.optim.Optimizer, True, True


@functools.cache
def fuse_weight_gradients(add_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
    """Makes Megatron's linear layers with ``gradient_accumulation_fusion`` call ``add_product(buffer, output gradient,
    input)``, which adds a weight's gradient to its float32 buffer, in place of apex's kernel (layers.py:569). Without
    it each gradient is a tensor of its own, which a hook adds to the buffer (distributed_data_parallel.py:440)."""
    from megatron.core.tensor_parallel import layers

    stand_in = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, gradient, buffer: add_product(buffer, gradient, x))
    layers.fused_weight_gradient_mlp_cuda = stand_in
    layers._grad_accum_fusion_available = True


@functools.cache
def hold_sent_tensors() -> None:
    """Keeps the memory of a tensor until its send has finished. For interleaved stages, whose schedule does not wait.

    The schedule empties a sent tensor before it waits for the send (schedules.py:1600; later versions wait first). The
    send refers to the tensor, not to its memory, which is reused: over gloo, and over NCCL since PyTorch records no
    streams for it, the next stage receives the new contents. Wrong losses, and no error.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    p2p_ops = p2p_communication._p2p_ops

    def send_aliases(
        *, tensor_send_prev: torch.Tensor | None, tensor_send_next: torch.Tensor | None, **options: Any
    ) -> Any:
        prev, following = (None if sent is None else sent.detach() for sent in (tensor_send_prev, tensor_send_next))
        return p2p_ops(tensor_send_prev=prev, tensor_send_next=following, **options)

    p2p_communication._p2p_ops = send_aliases


@contextlib.contextmanager
def replace_shape_exchange(shapes: Callable[..., Any]) -> Iterator[None]:
    """Lets ``shapes(communicator, …)`` return the shapes of what a stage receives. Upstream sends each before its
    tensor, waits for it and synchronizes the GPU (p2p_communication.py:156), for tensors of any lengths."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    with _replaced([(P2PCommunicator, "_communicate_shapes", shapes)]):
        yield


@functools.cache
def authenticate_objects() -> None:
    """Adds a MAC to every object of torch's object collectives, Megatron's and vLLM's calls of them too.

    All go through two functions that pickle and unpickle (distributed_c10d.py:3402 and 3424).
    """
    c10d: Any = dist.distributed_c10d
    to_tensor, to_object = c10d._object_to_tensor, c10d._tensor_to_object

    def sealed_tensor(obj: Any, device: Any, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        content, _ = to_tensor(obj, cpu_stand_ins.CPU, group)
        tensor = torch.frombuffer(bytearray(seal(content.numpy().tobytes())), dtype=torch.uint8)
        tensor = tensor.to(device, copy=True)  # torch enlarges it to the size of the largest one
        return tensor, torch.tensor([tensor.numel()], device=device)

    def opened_object(tensor: torch.Tensor, size: Any, group: Any) -> Any:
        content = opened(tensor.cpu().numpy().tobytes()[: int(size)])
        return to_object(torch.frombuffer(bytearray(content), dtype=torch.uint8), len(content), group)

    c10d._object_to_tensor, c10d._tensor_to_object = sealed_tensor, opened_object


def replace_gloo(make: Callable[..., Any]) -> None:
    """Lets ``make`` create the gloo back end of each new group: torch has no hook (distributed_c10d.py:2169)."""
    c10d: Any = dist.distributed_c10d
    gloo = torch._C._distributed_c10d.ProcessGroupGloo

    class Replaced(type):
        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            return make(*arguments, **options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, gloo)

    c10d.ProcessGroupGloo = Replaced("ProcessGroupGloo", (), {})


def follow_group_timeout() -> None:
    """Gives ``group_timeout`` to each new group for which none is named: of device meshes, DCP and vLLM. Torch would
    take half an hour, or ten minutes on NCCL, regardless of the default group (distributed_c10d.py:836)."""
    c10d: Any = dist.distributed_c10d
    c10d._get_default_timeout = lambda backend: group_timeout()


def time_collectives(measured: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps in ``measured`` what waits for other ranks. Every wait of torch, Megatron and vLLM on the host is one call.

    With a GPU also the collectives themselves: NCCL runs a synchronous one in the caller's stream, and there is nothing
    to wait for (distributed_c10d.py:3245).
    """
    work, group = torch._C._distributed_c10d.Work, dist.ProcessGroup
    work.wait = measured(work.wait)
    for name in filter(_COLLECTIVES.fullmatch, dir(group) if torch.cuda.is_available() else ()):
        setattr(group, name, measured(getattr(group, name)))


def initialize_model_parallel(layout: ParallelLayout) -> None:
    """Creates Megatron's process groups for a layout in its globals. Collective.

    Its order of axes is that of ``ParallelLayout``; there is no second set of groups on gloo.
    """
    from megatron.core import parallel_state

    with megatron_device():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            order="tp-cp-ep-dp-pp",
            distributed_timeout_minutes=timeout_seconds() / 60,  # its own is of 30 minutes
            create_gloo_process_groups=False,
        )


def exchange_megatron_globals(values: MegatronGlobals) -> MegatronGlobals:
    """Activates other process groups, none at all for an empty dict, and returns those active before.

    Megatron finds its groups in globals (parallel_state.py:27-142), of which there is one set: two models with
    different layouts take turns.
    """
    from megatron.core import parallel_state

    former = {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", name)}
    for name, value in former.items():
        setattr(parallel_state, name, values.get(name, {} if isinstance(value, dict) else None))
    return former


def seed_rng_tracker(seed: int) -> None:
    """Seeds Megatron's random-number tracker, of which a process has one (random.py:282), for the active groups."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with megatron_device():
        model_parallel_cuda_manual_seed(seed)


def rng_states() -> dict[str, Any]:
    """States of torch's generators and of Megatron's tracker, for a checkpoint."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def restore_rng_states(states: dict[str, Any]) -> None:
    """Sets what ``rng_states`` returned; the GPU's generator only in a process that uses one."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    if states["device"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def end_writers() -> None:
    """Ends the process that Megatron keeps for the results of checkpoint writers (filesystem_async.py:55). Killed with
    its rank it would leave a folder in TMPDIR."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue = filesystem_async._results_queue
    if queue is not None:
        queue._manager.shutdown()
        filesystem_async._results_queue = None


@contextlib.contextmanager
def patient_saves(folder: Path, failures: list[OSError]) -> Iterator[None]:
    """Makes dist_checkpointing wait for a failing file system (rlhpc.core.storage), and rewrite files from memory,
    because after a failed fsync the kernel may have dropped their data.

    Upstream writes each rank's shards once (filesystem_async.py:342). An error in what rank 0 alone reads and writes
    between collectives is raised on rank 0 alone, and the others wait for it forever (serialization.py:383/411/422,
    state_dict_saver.py:112/243). Here such errors are appended to ``failures``, for the ranks to agree on afterwards.
    """
    with _replaced(patient_stand_ins(folder, failures)):
        yield


@contextlib.contextmanager
def restricted_load(folder: Path) -> Iterator[Index]:
    """Makes dist_checkpointing load the checkpoint in ``folder`` without running code from it, and yields its index.
    Raises UserError for one that contains other names than those of its format.

    Upstream unpickles the index (torch/distributed/checkpoint/filesystem.py:930) and all objects
    (default_planner.py:387) without restrictions. For tensors and common.pt it uses torch's own restricted unpickler,
    which Megatron extends by classes that rlhpc does not need (safe_globals.py:20).
    """
    from megatron.core.dist_checkpointing.strategies import common
    from torch import _weights_only_unpickler
    from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader

    load = RestrictedLoad(folder)
    stand_ins = [
        (FileSystemReader, "read_metadata", lambda reader, *_, **__: load.metadata(reader)),
        (DefaultLoadPlanner, "load_bytes", lambda planner, item, value: load.load_bytes(planner, item, value)),
        (common.TorchCommonLoadStrategy, "load_common", lambda *_: load.common()),
        (_weights_only_unpickler, "_marked_safe_globals_set", set()),
    ]
    try:
        with _replaced(stand_ins):
            yield load.index
    except CheckpointException as error:
        found = [*load.refused, *(failure for failure, _ in error.failures.values() if isinstance(failure, UserError))]
        if not found:
            raise
        raise found[0] from None


@contextlib.contextmanager
def thread_setter_restored() -> Iterator[None]:
    """Restores ``torch.set_num_threads``, which vLLM's CPU worker replaces by a no-op for the whole process
    (v1/worker/cpu_worker.py:145)."""
    with _replaced([(torch, "set_num_threads", torch.set_num_threads)]):
        yield


@contextlib.contextmanager
def no_engine_queue() -> Iterator[None]:
    """Engines that are built inside have no message queue between their ranks.

    vLLM makes one in each tensor-parallel group (distributed/parallel_state.py:2151), with pickles from sockets that
    do not authenticate. Ranks that each run a scheduler send nothing there.
    """
    from vllm.distributed import parallel_state as state

    make = state.init_model_parallel_group

    @functools.wraps(make)
    def without(*arguments: Any, use_message_queue_broadcaster: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    with _replaced([(state, "init_model_parallel_group", without)]):
        yield


@functools.cache
def keep_transformers_classes() -> None:
    """Lets vLLM's Transformers back end compile a subclass of transformers' decoder instead of the class itself.

    Upstream decorates transformers' own class (model_executor/models/transformers/base.py:_decorate_cls_for_torch_
    compile): it gets another base, __init__ and __call__ (compilation/decorators.py:_support_torch_compile). The
    trainer's models of that class then lack attributes if they were built before, and cannot be built afterwards.
    """
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_cls_for_torch_compile = _note_class
    # The first call after the model is built.
    Base._create_hf_to_vllm_mapper = _replacing_classes(Base._create_hf_to_vllm_mapper)


def replace_random_sample(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Lets ``make(original)`` sample for vLLM's V1 runner: upstream's takes a kernel a seed (topk_topp_sampler.py)."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.random_sample = make(topk_topp_sampler.random_sample)


def unmap_vllm_allocation(address: int) -> bool:
    """Unmaps one allocation of vLLM's pool and removes it from the pool's records; False if it was unmapped before.

    vLLM's pool keeps what PyTorch frees in it, and maps it again at every wake-up (device_allocator/cumem.py).
    """
    from vllm.device_allocator import cumem, get_mem_allocator_instance

    allocations = get_mem_allocator_instance().pointer_to_data
    data = allocations.get(address)
    if data is None:
        return False
    assert not data.is_asleep, "memory freed while the engine sleeps"
    del allocations[address]
    cumem.unmap_and_release(data.handle)
    return True
