"""The hardware catalogue: GPUs, links between them, boxes. Data in data/hardware.yaml, each figure with its source."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from service.errors import UserError
from service.planning.curves import Curve

Trust = Literal["measured", "published", "assumed"]
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. `memory` bytes, `bandwidth` bytes/s by datasheet, `stream` the share a plain read reaches."""

    name: str
    title: str
    memory: float
    bandwidth: float
    stream: float
    flops: float
    capability: str
    trust: Trust
    source: str

    @property
    def readable(self) -> float:
        """Bytes per second that a well-written kernel reads."""
        return self.bandwidth * self.stream

    @property
    def is_cpu(self) -> bool:
        return self.capability == "cpu"


@dataclass(frozen=True)
class Algorithm:
    """One way to all-reduce: microseconds by message bytes. `setting` selects it (environment or engine option)."""

    name: str
    curve: Curve
    default: bool = False
    setting: Mapping[str, str] = field(default_factory=dict)

    def seconds(self, message_bytes: float) -> float:
        return self.curve.at(message_bytes) * 1e-6


@dataclass(frozen=True)
class Link:
    """How the GPUs of a box are joined."""

    name: str
    title: str
    algorithms: Mapping[str, Algorithm]
    trust: Trust
    source: str

    @property
    def default(self) -> Algorithm:
        return next(a for a in self.algorithms.values() if a.default)

    def pick(self, name: str, message_bytes: float) -> Algorithm:
        """The algorithm called `name`; "default" is the untuned one, "best" the fastest at this size."""
        if name == "default":
            return self.default
        if name == "best":
            return min(self.algorithms.values(), key=lambda a: a.seconds(message_bytes))
        if name not in self.algorithms:
            raise UserError(f"link {self.name} has no all-reduce {name!r}; it has {', '.join(self.algorithms)}")
        return self.algorithms[name]


@dataclass(frozen=True)
class Box:
    """One machine: `gpus` equal devices and their link."""

    name: str
    gpu: Gpu
    gpus: int
    link: Link
    measured_by_preflight: bool = False

    @property
    def trust(self) -> Trust:
        """The weaker of its two parts' trust."""
        order: tuple[Trust, ...] = ("assumed", "published", "measured")
        return min((self.gpu.trust, self.link.trust), key=order.index)

    def with_gpus(self, count: int) -> Box:
        return replace(self, gpus=count)


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DATA / "hardware.yaml").read_text())
    return loaded


@lru_cache(maxsize=1)
def allreduce_points() -> tuple[dict[str, str], ...]:
    """Rows of allreduce_points.csv, as text."""
    with (DATA / "allreduce_points.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))


def gpu(name: str) -> Gpu:
    return Gpu(name=name, **_numbers(_entry("gpus", name)))


def link(name: str) -> Link:
    entry = _entry("links", name)
    algorithms = {key: _algorithm(key, value) for key, value in entry["algorithms"].items()}
    return Link(name, entry["title"], algorithms, entry["trust"], entry["source"])


def box(name: str) -> Box:
    """A box of the catalogue by name, or from a preflight's JSON (a name that ends in .json). Raises UserError."""
    if name.endswith(".json"):
        from service.planning.measured import box_from_preflight

        return box_from_preflight(Path(name))
    entry = _entry("boxes", name)
    return Box(name, gpu(entry["gpu"]), int(entry["gpus"]), link(entry["link"]))


def names(kind: Literal["gpus", "links", "boxes"]) -> list[str]:
    return list(_catalogue()[kind])


def _entry(kind: str, name: str) -> dict[str, Any]:
    table: dict[str, dict[str, Any]] = _catalogue()[kind]
    if name not in table:
        near = get_close_matches(name, table, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown {kind[:-1]} {name!r}: {hint}the catalogue has {', '.join(table)}")
    return table[name]


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    """YAML reads 1.5e9 as text (it wants 1.5e+9)."""
    keys = ("memory", "bandwidth", "stream", "flops")
    return {k: float(v) if k in keys else v for k, v in entry.items()}


def _algorithm(name: str, entry: Mapping[str, Any]) -> Algorithm:
    points = [(float(x), float(y)) for x, y in entry.get("points", ())]
    if "topology" in entry:
        points += [
            (float(row["bytes"]), float(row["us"]))
            for row in allreduce_points()
            if row["topology"] == entry["topology"] and row["algorithm"] == entry["algorithm"]
        ]
    if not points:
        raise UserError(f"hardware.yaml: all-reduce {name} has no points")
    setting = {k: str(v) for k, v in entry.get("setting", {}).items()}
    return Algorithm(name, Curve.rising(points), bool(entry.get("default")), setting)
