"""Seconds that kernels take to read weights and multiply, by class of kernel and tokens in the step.

Table families (plugin, marlin, hybrid, bf16) interpolate data/kernels.csv, measured on one H200 at GLM-5's shapes; the
time per byte at M tokens is carried over to other shapes, and never beats the GPU's own readable bandwidth. Calibrated
families (nvfp4-*) are a bandwidth share fitted to published throughput. `llamacpp` is a roofline of one CPU.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from service.planning.curves import Curve
from service.planning.hardware import DATA, Gpu
from service.planning.settings import Calibration, Family
from service.planning.tensors import Kind

_PLAIN: frozenset[Kind] = frozenset({"small", "embedding"})


class Kernels(Protocol):
    """`seconds(kind, bytes, tokens)`: time of all kernels of one class in a step that reads `bytes` on one GPU."""

    def seconds(self, kind: Kind, read: float, tokens: float) -> float: ...


@lru_cache(maxsize=1)
def _tables() -> dict[tuple[str, str], Curve]:
    """(family, op) -> seconds per byte by M."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with (DATA / "kernels.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            rate = float(row["us"]) * 1e-6 / float(row["bytes"])
            points.setdefault((row["family"], row["op"]), []).append((float(row["m"]), rate))
    return {key: Curve.of(rows) for key, rows in points.items()}


@dataclass(frozen=True, slots=True)
class TableKernels:
    """Measured times per byte, scaled by `scale` (1: as on the H200 where they were measured)."""

    family: str
    gpu: Gpu
    scale: float = 1.0

    def seconds(self, kind: Kind, read: float, tokens: float) -> float:
        floor = read / self.gpu.readable
        if kind in _PLAIN or read <= 0:
            return floor
        family, op = ("bf16", "linear") if kind == "bf16" else (self.family, kind)
        curve = _tables().get((family, op)) or _tables()[("bf16", "linear" if op == "moe" else op)]
        return max(floor, read * curve.at(max(1.0, tokens)) * self.scale)


@dataclass(frozen=True, slots=True)
class FittedKernels:
    """A share of the datasheet's bandwidth: experts by tokens in the step, everything else constant."""

    gpu: Gpu
    moe: Curve
    linear: float

    def seconds(self, kind: Kind, read: float, tokens: float) -> float:
        share = self.moe.at(max(1.0, tokens)) if kind == "moe" else self.linear
        return read / (self.gpu.bandwidth * share)


@dataclass(frozen=True, slots=True)
class Roofline:
    """llama.cpp on a CPU: memory or arithmetic, whichever is slower. `flops_per_byte`: 2 * weights / bytes read."""

    gpu: Gpu
    flops_per_byte: float

    def seconds(self, kind: Kind, read: float, tokens: float) -> float:
        if kind in _PLAIN:
            return read / self.gpu.readable
        return max(read / self.gpu.readable, read * self.flops_per_byte * tokens / self.gpu.flops)


def kernels(family: Family, gpu: Gpu, calibration: Calibration, flops_per_byte: float) -> Kernels:
    if family == "llamacpp":
        return Roofline(gpu, flops_per_byte)
    if family.startswith("nvfp4"):
        return FittedKernels(gpu, Curve.of(calibration.moe_efficiency, flat_end=True), calibration.linear_efficiency)
    return TableKernels(family, gpu, calibration.kernel_scale)
