"""A box of eight GPUs that does not exist, and everything that can be wrong with it. A real Probe, not a mock: the
report is made by the product's own code from what it answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from service.preflight.probe import ALGORITHMS, AllReduce, Copy, Device, Host, Kernels, ProbeFailed

GPUS = 8
NCCL = ((4096, 48.0), (12288, 48.2), (65536, 48.7), (131072, 51.6), (262144, 56.5), (3145728, 160.0))
LL = ((4096, 26.0), (12288, 26.1), (65536, 26.2), (131072, 32.1), (262144, 37.3), (3145728, 260.0))


@dataclass(frozen=True)
class BoxProbe:
    """Healthy as it stands; `faults` maps a method's name to what it does instead."""

    faults: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def _answer(self, name: str, healthy: Any, *args: Any) -> Any:
        return self.faults[name](healthy, *args) if name in self.faults else healthy

    def host(self) -> Host:
        healthy = Host("box", 64, 1 << 40, 4e11, 64 << 30, 60 << 30, 1 << 20, -1, 2, "performance", "passthrough")
        return self._answer("host", healthy)

    def devices(self) -> list[Device]:
        name = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
        healthy = [
            Device(i, name, 102_641_958_912, "12.0", "580.95.05", 2600, 2617, "", 5, 5, 16, 16, i // 4, 1 << 20)
            for i in range(GPUS)
        ]
        return self._answer("devices", healthy)

    def kernels(self) -> Kernels:
        return self._answer("kernels", Kernels("2.13.0", "0.32.0", "0.0.5", True))

    def peer_access(self) -> list[list[bool]]:
        return self._answer("peer_access", [[True] * GPUS for _ in range(GPUS)])

    def copies(self) -> list[Copy]:
        healthy = [
            Copy(a, b, size, 0, 5.2e10)
            for a in range(GPUS)
            for b in range(GPUS)
            if a != b
            for size in (1 << 20, 1 << 26)
        ]
        return self._answer("copies", healthy)

    def first_collective(self) -> float:
        return self._answer("first_collective", 7.5)

    def allreduce(self, name: str) -> AllReduce:
        tables = {"nccl": NCCL, "nccl-simple": NCCL, "nccl-ll": LL}
        missing = "" if name in tables else "not on this box"
        return self._answer("allreduce", AllReduce(name, tables.get(name, ()), ALGORITHMS[name], missing), name)

    def read_bandwidth(self) -> list[float]:
        return self._answer("read_bandwidth", [1.61e12] * GPUS)


def fails(message: str, *, hung: bool = False) -> Callable[..., Any]:
    def fault(*_: Any) -> Any:
        raise ProbeFailed(message, hung=hung)

    return fault


def change(**values: Any) -> Callable[..., Any]:
    """A frozen answer with fields changed."""
    return lambda healthy, *_: replace(healthy, **values)


def one_device(**values: Any) -> Callable[..., Any]:
    """GPU 3 differs."""
    return lambda healthy: [replace(d, **values) if d.index == 3 else d for d in healthy]


def lost_copies(healthy: list[Copy]) -> list[Copy]:
    """What a translating IOMMU does: success is reported, the data is not there."""
    return [replace(c, wrong=c.bytes) if {c.source, c.target} == {0, 5} else c for c in healthy]


def collapsed(healthy: AllReduce, name: str) -> AllReduce:
    """The published posted-write collapse of one switch, for NCCL's own choice."""
    rows = ((4096, 30.6), (12288, 64.3), (65536, 503.9), (131072, 900.0), (3145728, 30000.0))
    return replace(healthy, table=rows) if name == "nccl" else healthy


def one_algorithm_hangs(healthy: AllReduce, name: str) -> AllReduce:
    if name == "nccl-ll":
        raise ProbeFailed("allreduce did not end within 120 s and was killed", hung=True)
    return healthy


CHILD_ENVIRONMENT = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
