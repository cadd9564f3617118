"""A box as `glm5 preflight` measured it, in place of the catalogue's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.errors import UserError
from service.planning import hardware
from service.planning.curves import Curve
from service.planning.hardware import Algorithm, Box, Gpu, Link

FORMAT = "glm5-preflight/1"
LLAMACPP_STREAM = 0.73  # of what plain sums read: 15.8 against 21.5 GB/s on the 2-core VM of the catalogue


def box_from_preflight(path: Path) -> Box:
    """Read the JSON that preflight wrote. Figures it lacks (FLOP/s) come from the catalogue's part of the same name.
    Raises UserError naming the file and the fault."""
    try:
        tree = json.loads(path.read_text())
    except OSError as fault:
        raise UserError(f"cannot read preflight {path}: {fault.strerror}") from None
    except ValueError as fault:
        raise UserError(f"preflight {path} is not JSON: {fault}") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise UserError(f"{path} is not a preflight ({FORMAT}): write one with glm5 preflight --output {path}")
    try:
        return _box(tree)
    except (KeyError, TypeError, ValueError) as fault:
        raise UserError(f"preflight {path} is damaged: {type(fault).__name__} {fault}") from None


def _box(tree: dict[str, Any]) -> Box:
    host = str(tree["host"])
    devices = tree["gpus"]
    if not devices:
        return cpu_box(host, float(tree["memory"]), float(tree["memory_bandwidth"]), int(tree["cpus"]))
    first = devices[0]
    base = hardware.gpu(part_name(str(first["name"])))
    # the slowest card sets the pace of tensor parallelism
    read = min(float(device.get("read_bandwidth") or base.readable) for device in devices)
    bandwidth = max(base.bandwidth, read)
    device = Gpu(
        name=base.name,
        title=str(first["name"]),
        memory=min(float(device["memory"]) for device in devices),
        bandwidth=bandwidth,
        stream=read / bandwidth,
        flops=base.flops,
        capability=str(first["capability"]),
        trust="measured",
        source="glm5 preflight",
    )
    return Box(host, device, len(devices), _link(tree, len(devices)), measured_by_preflight=True)


def cpu_box(host: str, memory: float, bandwidth: float, cpus: int) -> Box:
    """A machine that serves on its CPU. `bandwidth`: bytes/s that plain sums on all cores read."""
    base = hardware.gpu("cpu-2core")
    cpu = Gpu(
        name=f"{host}-cpu",
        title=f"CPU of {host}",
        memory=memory,
        bandwidth=bandwidth,
        stream=LLAMACPP_STREAM,
        flops=base.flops * cpus / 2,
        capability="cpu",
        trust="measured",
        source="memory bandwidth measured; FLOP/s of a 2-core VM scaled by cores",
    )
    return Box(host, cpu, 1, hardware.link("none"), measured_by_preflight=True)


def _link(tree: dict[str, Any], gpus: int) -> Link:
    tables: dict[str, list[list[float]]] = tree.get("allreduce") or {}
    if gpus == 1:
        return hardware.link("none")
    if not tables:
        raise ValueError("no all-reduce was measured on a box of several GPUs; run preflight again without --quick")
    default = str(tree.get("default_allreduce") or next(iter(tables)))
    algorithms = {
        name: Algorithm(
            name,
            Curve.rising([(float(x), float(y)) for x, y in rows]),
            name == default,
            {k: str(v) for k, v in (tree.get("allreduce_settings") or {}).get(name, {}).items()},
        )
        for name, rows in tables.items()
        if rows
    }
    return Link("measured", "as measured by glm5 preflight", algorithms, "measured", "glm5 preflight")


def part_name(device: str) -> str:
    """The catalogue's GPU for a device name as the driver reports it. Raises UserError for a part it does not know."""
    bare = device.lower().replace(" ", "-")
    for name in hardware.names("gpus"):
        if name in bare:
            return name
    raise UserError(f"the catalogue has no GPU like {device!r}; it has {', '.join(hardware.names('gpus'))}")
