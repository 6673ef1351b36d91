"""GPUs and the nodes around them, by data sheet; a site's file adds or changes entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from rlhpc.config.jobs import memory_mib
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import DiskSection, EfficiencySection, GpuEntry
from rlhpc.core.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Reserves:
    """Bytes of device memory that do not follow from a model's sizes; ``python -m bench.acceptance`` measures both.

    ``context``: CUDA's context, cuBLAS's workspaces, NCCL's communicators, in every phase. ``sleeping_engine``: vLLM's
    CUDA graphs and communicators, which its sleep does not give back.
    """

    context: int = 3 << 29
    sleeping_engine: int = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One GPU and its share of the node. Bandwidths are in GB/s (10^9 bytes), one direction."""

    name: str
    tflops: float  # dense bfloat16, 10^12 operations a second
    memory_gib: float  # as the driver reports it
    memory_gbps: float
    node_gbps: float  # to the other GPUs that it is linked with, all of them together
    network_gbps: float  # its share of the node's network adapters
    cpu_link_gbps: float  # to the host's memory
    cpu_memory_gbps: float  # its share of the host's memory bandwidth
    per_node: int = 8
    linked: int = 8  # GPUs that reach each other without the network
    cpu_memory_gib: float | None = None  # memory of the node's host, where it is known
    device: str = ""  # part of the name that the driver gives it
    context_gib: float = 1.5  # device memory of a rank's CUDA context and libraries: an estimate
    sleeping_engine_gib: float = 1.0  # that an engine keeps while it sleeps: an estimate
    driver: str = ""  # version of the NVIDIA driver, where the site's file has it

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def reserves(self) -> Reserves:
        return Reserves(int(self.context_gib * 2**30), int(self.sleeping_engine_gib * 2**30))


# tflops, memory and links: the vendors' data sheets (NVIDIA A100, H100, H200, HGX B200, GB200 NVL72; AMD MI300X),
# without sparsity's factor of two. memory_gib: what nvidia-smi and rocm-smi report. Network and host: data sheets of
# whole systems. DGX A100: 200 Gb/s for each GPU; two EPYC 7742 with eight channels of DDR4-3200, 410 GB/s a node. DGX
# H100 and H200: 400 Gb/s; two Xeon 8480C, eight channels of DDR5-4800, 614 GB/s. DGX B200: Xeon 8570, DDR5-5600,
# 717 GB/s. GB200: one Grace for two GPUs, LPDDR5X of 512 GB/s, NVLink-C2C 450 GB/s one way. MI300X: two EPYC 9004,
# twelve channels of DDR5-4800, 922 GB/s. PCIe 4 x16 is 32 GB/s one way, PCIe 5 x16 64.
_TABLE = (
    # 312 TFLOP/s, 1,555 GB/s, NVLink 3 600 GB/s both ways: A100 data sheet.
    Gpu("a100-40", 312.0, 40.0, 1555, 300, 25, 32, 51, device="A100-SXM4-40GB"),
    # 2,039 GB/s: A100 80GB data sheet.
    Gpu("a100-80", 312.0, 80.0, 2039, 300, 25, 32, 51, device="A100"),
    # 756 TFLOP/s, 2.0 TB/s; peers over PCIe 5 (NVLink joins pairs alone): H100 PCIe product brief.
    Gpu("h100-pcie", 756.0, 79.6, 2000, 64, 25, 64, 77, device="H100 PCIe"),
    # 989.5 TFLOP/s (1,979 with sparsity), 3.35 TB/s, NVLink 4 900 GB/s both ways: H100 data sheet.
    Gpu("h100", 989.5, 79.6, 3350, 450, 50, 64, 77, device="H100"),
    # 4.8 TB/s, 141 GB: H200 data sheet.
    Gpu("h200", 989.5, 140.4, 4800, 450, 50, 64, 77, device="H200"),
    # 148 TFLOP/s, 4.0 TB/s, 96 GB, NVLink 4: NVIDIA's H20 specification, as vendors of HGX H20 systems print it.
    Gpu("h20", 148.0, 95.6, 4000, 450, 50, 64, 77, device="H20"),
    # 18 PFLOP/s dense for eight, 8 TB/s, 180 GB, NVLink 5 1,800 GB/s both ways: HGX and DGX B200 data sheets.
    Gpu("b200", 2250.0, 179.0, 8000, 900, 50, 64, 90, device="B200"),
    # 180 PFLOP/s dense for 72, 8 TB/s, 186 GB; all 72 are linked, four lie on a node: GB200 NVL72 data sheet.
    Gpu("gb200", 2500.0, 185.0, 8000, 900, 50, 225, 256, per_node=4, linked=72, device="GB200"),
    # 1,307.4 TFLOP/s, 5.3 TB/s, 192 GB, seven xGMI links of 64 GB/s one way: MI300X data sheet.
    Gpu("mi300x", 1307.4, 192.0, 5300, 448, 50, 64, 115, device="MI300X"),
)
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}
_ALSO = {"h100-sxm": "h100", "a100": "a100-80", "h100-80": "h100", "h100-sxm5": "h100"}


def peak_tflops(device_name: str) -> float | None:
    """Dense bfloat16 TFLOP/s of a GPU by the driver's name for it, None when it is not known."""
    found = gpu_of_device(device_name)
    return found.tflops if found is not None else None


def linked_ranks(ranks_per_node: int, gpu: Gpu | None) -> int:
    """Neighbouring ranks that need no network between them: those of a node, or of a rack that is linked."""
    return max(ranks_per_node, gpu.linked if gpu is not None and gpu.linked > gpu.per_node else 1)


@dataclass(frozen=True)
class Site:
    """All GPUs by name, and what is reached of their figures."""

    gpus: Mapping[str, Gpu]
    efficiency: EfficiencySection
    disk: DiskSection

    def find(self, name: str) -> Gpu | None:
        """The one of that name, None where it is not known."""
        return self.gpus.get(_own_name(name))

    def gpu(self, name: str, where: str) -> Gpu:
        """The one of that name; raises UserError."""
        known = _own_name(name)
        if known not in self.gpus:
            raise UserError(f"no GPU {name!r} is known", where=where, remedy=did_you_mean(known, self.gpus))
        return self.gpus[known]


def read_site(config: RunConfig) -> Site:
    """The table of GPUs with the site's entries over it, and the site's other figures. Raises UserError."""
    return Site(_merged(config.site.gpus), config.site.efficiency, config.site.disk)


def named_gpu(config: RunConfig, site: Site, name: str | None = None) -> Gpu | None:
    """The GPU that is named on the command line, in ``planning.gpu`` or, if it is known, in ``slurm.gpu_type``."""
    if name is not None:
        return site.gpu(name, "--gpu")
    if config.planning.gpu is not None:
        return site.gpu(config.planning.gpu, "planning.gpu")
    return site.find(config.slurm.gpu_type or "")


def _own_name(name: str) -> str:
    """As the table has it."""
    return _ALSO.get(name.lower(), name.lower())


def _merged(entries: Mapping[str, GpuEntry]) -> dict[str, Gpu]:
    gpus = dict(GPUS)
    for name, entry in entries.items():
        key = _own_name(name)
        base = gpus.get(_own_name(entry.like or key))
        given = entry.model_dump(exclude={"like"}, exclude_none=True)
        if base is None and entry.like is not None:
            raise UserError(
                f"no GPU {entry.like!r}", where=f"site.gpus.{name}.like", remedy=did_you_mean(entry.like, gpus)
            )
        if base is None:
            needed = [field.name for field in fields(Gpu)[1:8] if field.name not in given]
            if needed:
                remedy = f"add it, or like: and the name of a GPU that it is like ({', '.join(GPUS)})"
                raise UserError("is missing", where=f"site.gpus.{name}.{needed[0]}", remedy=remedy)
            given = {"linked": given.get("per_node", 8), **given}
            gpus[key] = Gpu(name=key, **given)
        else:
            gpus[key] = replace(base, name=key, **given)
    return gpus


# Figures of an acceptance by the field of GpuEntry that they are.
MEASURED = {"libraries": "context_gib", "engine asleep": "sleeping_engine_gib"}


def site_entry(gpu: str, figures: Mapping[str, float], driver: str | None = None) -> str:
    """YAML lines for the site's file: what an acceptance has measured of a GPU, which is named as in the table.

    ``figures`` in GiB by their names in the acceptance ("8b: engine asleep"): the largest of each kind counts, those
    that ``MEASURED`` lacks are left out. Empty without any.
    """
    largest: dict[str, float] = {}
    for name, value in figures.items():
        field = MEASURED.get(name.rpartition(": ")[2])
        if field is not None:
            largest[field] = max(value, largest.get(field, 0.0))
    found = {field: f"{value:.2f}" for field, value in largest.items()}
    if found and driver is not None:
        found["driver"] = f'"{driver}"'
    lines = [f"    {field}: {value}" for field, value in found.items()]
    return "\n".join(["gpus:", f"  {_own_name(gpu)}:", *lines, ""]) if lines else ""


def gpu_of_device(device_name: str) -> Gpu | None:
    """The entry of the table for a GPU by the driver's name for it."""
    found = [gpu for gpu in _TABLE if gpu.device in device_name]
    return max(found, key=lambda gpu: len(gpu.device), default=None)


def device_tflops(config: RunConfig, device_name: str) -> float | None:
    """Dense bfloat16 TFLOP/s of the GPU that the driver names so: of the entry in ``slurm.gpu_type`` if it is that GPU,
    else of the nearest one of the site's and the table's. None if it is not known."""
    site = read_site(config)
    own = site.find(config.slurm.gpu_type or "")
    if own is not None and own.device in device_name:
        return own.tflops
    found = [gpu for gpu in site.gpus.values() if gpu.device and gpu.device in device_name]
    nearest = max(found, key=lambda gpu: len(gpu.device), default=None)
    return nearest.tflops if nearest is not None else None


def cpu_memory_limit(config: RunConfig, gpu: Gpu | None) -> tuple[str, float] | None:
    """Bytes that a job's ranks have of a node's memory, and the key that says so; None where nothing does."""
    asked = memory_mib(config.slurm.memory) if config.slurm.memory is not None else 0
    if asked:
        return "slurm.memory", asked * 2**20
    if gpu is not None and gpu.cpu_memory_gib is not None:
        return "site.gpus", gpu.cpu_memory_gib * 2**30
    return None
