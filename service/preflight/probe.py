"""What preflight asks of a machine, and the answers as plain values. Two probes exist: the real one, and the tests'."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

Table = tuple[tuple[int, float], ...]
"""(message bytes, microseconds), ascending."""


class ProbeFailed(Exception):
    """The probe could not answer: what failed, in one line. `hung`: it was killed at its deadline."""

    def __init__(self, message: str, *, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU as the driver reports it. Bytes and MHz; zeros where the driver is silent."""

    index: int
    name: str
    memory: int
    capability: str
    driver: str
    sm_mhz: int = 0
    max_sm_mhz: int = 0
    throttle: str = ""
    pcie_generation: int = 0
    pcie_generation_max: int = 0
    pcie_width: int = 0
    pcie_width_max: int = 0
    numa: int = -1
    used: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """One pattern sent from GPU to GPU and read back there. `wrong` bytes differ from what was sent."""

    source: int
    target: int
    bytes: int
    wrong: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Host:
    """The machine around the GPUs. `memory_bandwidth` bytes/s read by all cores; `iommu`: "off", "passthrough",
    "translated" or "unknown"."""

    name: str
    cpus: int
    memory: int
    memory_bandwidth: float
    shm_bytes: int
    shm_free: int
    open_files: int
    locked_memory: int
    numa_nodes: int
    governor: str = ""
    iommu: str = "unknown"


@dataclass(frozen=True, slots=True)
class Kernels:
    """The GGUF kernels of the installed packages. `compiled`: the plugin's CUDA extension loads with this torch."""

    torch: str = ""
    vllm: str = ""
    plugin: str = ""
    compiled: bool = False
    fault: str = ""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One algorithm's table, or why there is none. `settings` select it."""

    name: str
    table: Table = ()
    settings: dict[str, str] = field(default_factory=dict)
    missing: str = ""


class Probe(Protocol):
    """Every method may raise ProbeFailed; none waits longer than its own deadline."""

    def host(self) -> Host: ...

    def devices(self) -> list[Device]: ...

    def kernels(self) -> Kernels: ...

    def peer_access(self) -> list[list[bool]]: ...

    def copies(self) -> list[Copy]: ...

    def first_collective(self) -> float:
        """Seconds from process start to the end of the first all-reduce over all GPUs, result checked."""
        ...

    def allreduce(self, name: str) -> AllReduce:
        """Measure one of ALGORITHMS."""
        ...

    def read_bandwidth(self) -> list[float]:
        """Bytes per second of a plain read, by GPU."""
        ...


# name -> environment that selects it. "nccl" is NCCL's own choice; the others force a protocol (or another library).
ALGORITHMS: dict[str, dict[str, str]] = {
    "nccl": {},
    "nccl-simple": {"NCCL_PROTO": "Simple"},
    "nccl-ll": {"NCCL_PROTO": "LL"},
    "nccl-ll128": {"NCCL_PROTO": "LL128"},
    "vllm-custom": {},
    "torch-oneshot": {},
}
SIZES = (1024, 4096, 12288, 32768, 65536, 98304, 196608, 393216, 786432, 1572864, 3145728, 12582912)
