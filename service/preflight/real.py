"""The real probe: asks the operating system here, and torch, NCCL and vLLM in child processes with deadlines."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.preflight.probe import ALGORITHMS, SIZES, AllReduce, Copy, Device, Host, Kernels, ProbeFailed

# NVLink multicast stays off: a fault in it can take a shared host's GPUs out of service, and vLLM does not need it.
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SMI_FIELDS = (
    "index,driver_version,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,memory.used,pci.bus_id"
)
# Bits of NVML's clocks-event reasons that mean trouble (idle and application clocks do not).
BAD_THROTTLE = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


class RealProbe:
    """`environment` is what children inherit; `timeout_s`: each child's deadline (the first collective has its own);
    `folder`: where children start and find this package."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        timeout_s: float = 120.0,
        collective_timeout_s: float = 60.0,
        sizes: Sequence[int] = SIZES,
        folder: Path = Path(__file__).parents[2],
    ) -> None:
        self._environment = dict(environment) | {k: v for k, v in SAFE.items() if k not in environment}
        self._timeout_s, self._collective_timeout_s, self._sizes = timeout_s, collective_timeout_s, tuple(sizes)
        self._folder, self._count = folder, 0

    # -- here

    def host(self) -> Host:
        shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
        nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
        governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
        cpus = len(os.sched_getaffinity(0))
        return Host(
            name=socket.gethostname(),
            cpus=cpus,
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            memory_bandwidth=memory_bandwidth(cpus),
            shm_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
            shm_free=shm.f_frsize * shm.f_bavail if shm else 0,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            numa_nodes=nodes,
            governor=governor.read_text().strip() if governor.is_file() else "",
            iommu=iommu(),
        )

    def devices(self) -> list[Device]:
        answer = self._one("devices")
        smi = self._smi()
        found = [Device(driver=smi.get(d["index"], {}).get("driver", ""), **d) for d in answer["devices"]]
        self._count = len(found)
        return [_with_smi(d, smi.get(d.index, {})) for d in found]

    # -- in children

    def kernels(self) -> Kernels:
        return Kernels(**self._one("kernels", load=self._count > 0))

    def peer_access(self) -> list[list[bool]]:
        return [[bool(v) for v in row] for row in self._one("peer_access")["access"]]

    def copies(self) -> list[Copy]:
        rows, trying = [], None
        lines, fault = self._run("copies", [{}], self._timeout_s)
        for line in lines:
            if "trying" in line:
                trying = line["trying"]
            else:
                rows.append(Copy(**line))
        if fault:
            where = f"copying from GPU {trying[0]} to GPU {trying[1]}: " if trying else ""
            raise ProbeFailed(where + str(fault), hung=fault.hung)
        return rows

    def first_collective(self) -> float:
        lines, fault = self._ranks("first_collective", {}, self._collective_timeout_s)
        if fault:
            raise fault
        if not all(line["right"] for line in lines):
            raise ProbeFailed("the first all-reduce ended, with a wrong sum")
        return max(float(line["seconds"]) for line in lines)

    def allreduce(self, name: str) -> AllReduce:
        settings = ALGORITHMS[name]
        job = {"algorithm": name, "sizes": list(self._sizes)}
        lines, fault = self._ranks("allreduce", job, self._timeout_s, settings)
        table = tuple((int(line["bytes"]), round(float(line["us"]), 2)) for line in lines if "us" in line)
        missing = next((str(line["missing"]) for line in lines if "missing" in line), "")
        if fault and not table:
            raise fault
        return AllReduce(name, table, dict(settings), missing)

    def read_bandwidth(self) -> list[float]:
        lines, fault = self._run("read_bandwidth", [{}], self._timeout_s)
        if fault:
            raise fault
        return [float(line["bytes_per_s"]) for line in lines]

    # -- processes

    def _one(self, job: str, **values: Any) -> dict[str, Any]:
        lines, fault = self._run(job, [values], self._timeout_s)
        if fault:
            raise fault
        if not lines:
            raise ProbeFailed(f"{job}: no answer")
        return lines[-1]

    def _ranks(
        self, job: str, values: dict[str, Any], timeout_s: float, settings: Mapping[str, str] | None = None
    ) -> tuple[list[dict[str, Any]], ProbeFailed | None]:
        """One process a GPU, meeting through a file (no port is opened)."""
        if self._count < 2:
            raise ProbeFailed("fewer than two GPUs")
        with tempfile.TemporaryDirectory(prefix="glm5-preflight-") as folder:
            common = values | {"world": self._count, "store": f"{folder}/store"}
            jobs = [common | {"rank": rank} for rank in range(self._count)]
            return self._run(job, jobs, timeout_s, settings)

    def _run(
        self,
        job: str,
        values: Sequence[dict[str, Any]],
        timeout_s: float,
        settings: Mapping[str, str] | None = None,
    ) -> tuple[list[dict[str, Any]], ProbeFailed | None]:
        """Run one child for each of `values`; all lines they said, and the first fault. Kills every child's group at
        the deadline, and as soon as one fails (the others would wait for it)."""
        environment = self._environment | dict(settings or {})
        children: list[tuple[subprocess.Popen[str], list[str], list[str], list[threading.Thread]]] = []
        fault: ProbeFailed | None = None
        try:
            for value in values:
                child = subprocess.Popen(
                    [sys.executable, "-m", "service.preflight.jobs", job, json.dumps(value)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    env=environment,
                    cwd=self._folder,
                    start_new_session=True,
                )
                out: list[str] = []
                err: list[str] = []
                readers = [
                    threading.Thread(target=_drain, args=(stream, lines), daemon=True)
                    for stream, lines in ((child.stdout, out), (child.stderr, err))
                ]
                for reader in readers:
                    reader.start()
                children.append((child, out, err, readers))
            deadline = time.monotonic() + timeout_s
            while any(child.poll() is None for child, *_ in children):
                if any(child.returncode for child, *_ in children):
                    break
                if time.monotonic() > deadline:
                    fault = ProbeFailed(f"{job} did not end within {timeout_s:.0f} s and was killed", hung=True)
                    break
                time.sleep(0.02)
        finally:
            for child, *_ in children:
                _kill(child)
            for *_, readers in children:
                for reader in readers:
                    reader.join(timeout=5)
        if fault is None:
            for child, _, err, _ in children:
                if child.returncode and child.returncode > 0:
                    fault = ProbeFailed(f"{job}: {_last_line(err)}")
                    break
                if child.returncode and fault is None and len(children) == 1:
                    fault = ProbeFailed(f"{job}: killed by signal {-child.returncode}")
        return [said for _, out, *_ in children for line in out if (said := _parse(line)) is not None], fault

    def _smi(self) -> dict[int, dict[str, Any]]:
        for fields in (SMI_FIELDS, SMI_FIELDS.replace("clocks_throttle_reasons", "clocks_event_reasons")):
            command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return {}
            if done.returncode == 0:
                return parse_smi(done.stdout)
        return {}


def parse_smi(text: str) -> dict[int, dict[str, Any]]:
    """Rows of nvidia-smi's CSV by index; fields it does not support are left out."""
    found: dict[int, dict[str, Any]] = {}
    names = ["driver", "sm_mhz", "max_sm_mhz", "throttle", "pcie_generation", "pcie_generation_max"]
    names += ["pcie_width", "pcie_width_max", "used", "bus"]
    for line in text.splitlines():
        index, *cells = [cell.strip() for cell in line.split(",")]
        if not index.isdigit() or len(cells) != len(names):
            continue
        row: dict[str, Any] = {}
        for name, cell in zip(names, cells, strict=True):
            if name in ("driver", "bus"):
                row[name] = cell
            elif name == "throttle" and cell.startswith("0x"):
                bits = int(cell, 16)
                row[name] = ", ".join(word for bit, word in BAD_THROTTLE.items() if bits & bit)
            elif cell.isdigit():
                row[name] = int(cell)
        if "used" in row:
            row["used"] <<= 20
        found[int(index)] = row
    return found


def _with_smi(device: Device, row: Mapping[str, Any]) -> Device:
    values = {k: v for k, v in row.items() if k not in ("driver", "bus")}
    bus = str(row.get("bus", "")).lower()
    node = Path(f"/sys/bus/pci/devices/{bus[-12:]}/numa_node")
    if bus and node.is_file():
        values["numa"] = int(node.read_text())
    return replace(device, **values)


def iommu() -> str:
    """How the kernel was told to treat device memory access. Translated DMA can lose peer copies without an error."""
    command = Path("/proc/cmdline")
    words = command.read_text().split() if command.is_file() else []
    groups = Path("/sys/kernel/iommu_groups")
    if "iommu=pt" in words or "iommu.passthrough=1" in words:
        return "passthrough"
    if groups.is_dir():
        return "translated" if any(groups.iterdir()) else "off"
    return "unknown"


def memory_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read together from main memory (numpy sums over 64 MiB each)."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    threads = max(1, min(threads, 64))
    blocks = [np.ones(8 << 20) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.sum, blocks))
            best = min(best, time.perf_counter() - began)
    return sum(block.nbytes for block in blocks) / best


def _drain(stream: Any, lines: list[str]) -> None:
    for line in stream:
        lines.append(line)
    stream.close()


def _parse(line: str) -> dict[str, Any] | None:
    """A line of JSON; None for what a library printed, or a line that a kill cut short."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait(timeout=10)


def _last_line(lines: Sequence[str]) -> str:
    told = [line.strip() for line in lines if line.strip()]
    return told[-1][:300] if told else "ended without a word"
