"""What the answers mean: one finding a line, with what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from service.preflight.probe import Copy, Device, Host, Kernels, ProbeFailed

Status = Literal["ok", "warn", "fail", "skip"]

MIN_OPEN_FILES = 65536  # vLLM, Ray and 1000 client sockets
MIN_SHM_PER_GPU = 1 << 30  # NCCL's and vLLM's shared buffers; containers give 64 MB by default
SLOW_READ = 0.75  # of the datasheet's bandwidth
DRIVER_MIN = 570  # first branch with Blackwell workstation boards and CUDA 12.8


@dataclass(frozen=True, slots=True)
class Finding:
    """`found`: what was seen; `meaning`: why it matters; `mend`: what to do (empty when ok)."""

    name: str
    status: Status
    found: str
    meaning: str = ""
    mend: str = ""


def gpus(devices: Sequence[Device] | ProbeFailed) -> list[Finding]:
    if isinstance(devices, ProbeFailed):
        return [
            Finding(
                "GPUs",
                "fail" if devices.hung else "warn",
                str(devices),
                "torch could not ask for GPUs; only the CPU engine can run",
                "install the gpu extra (torch with CUDA) and a driver; nvidia-smi must list the GPUs",
            )
        ]
    if not devices:
        return [
            Finding(
                "GPUs",
                "warn",
                "none on this machine",
                "vLLM cannot run; llama.cpp serves on the CPU. Checks of GPUs and links are skipped",
                "run this on the box that will serve GLM-5",
            )
        ]
    first = devices[0]
    same = len({(d.name, d.memory) for d in devices}) == 1
    found = [
        Finding(
            "GPUs",
            "ok" if same else "warn",
            f"{len(devices)} x {first.name}, {first.memory / 2**30:.0f} GiB, compute capability {first.capability}"
            if same
            else ", ".join(f"{d.index}: {d.name}" for d in devices),
            "" if same else "tensor parallelism runs at the pace, and with the memory, of the weakest",
            "" if same else "serve on equal GPUs (CUDA_VISIBLE_DEVICES)",
        )
    ]
    used = [d for d in devices if d.used > 2 * 2**30]
    if used:
        found.append(
            Finding(
                "GPU memory in use",
                "warn",
                ", ".join(f"GPU {d.index}: {d.used / 2**30:.1f} GiB" for d in used),
                "another process holds memory that the plan counts on",
                "end it (nvidia-smi shows which), or plan with less",
            )
        )
    found.append(_driver(first))
    found += _clocks(devices)
    found += _pcie(devices)
    return found


def _driver(device: Device) -> Finding:
    major = device.driver.split(".")[0]
    if not major.isdigit():
        return Finding("driver", "warn", "version unknown", "nvidia-smi did not answer", "look at nvidia-smi")
    if int(major) < DRIVER_MIN:
        return Finding(
            "driver",
            "fail",
            device.driver,
            f"older than branch {DRIVER_MIN}: torch's CUDA may not start, RTX PRO Blackwell is unknown to it",
            f"install driver {DRIVER_MIN} or newer",
        )
    return Finding("driver", "ok", device.driver)


def _clocks(devices: Sequence[Device]) -> list[Finding]:
    bad = [d for d in devices if d.throttle]
    if bad:
        return [
            Finding(
                "clocks",
                "warn",
                ", ".join(f"GPU {d.index}: {d.throttle}" for d in bad),
                "throttled: every step waits for the slowest GPU",
                "cooling and power first (nvidia-smi -q -d PERFORMANCE), then measure again",
            )
        ]
    if any(d.max_sm_mhz for d in devices):
        return [Finding("clocks", "ok", f"not throttled, up to {max(d.max_sm_mhz for d in devices)} MHz")]
    return [Finding("clocks", "skip", "the driver does not say")]


def _pcie(devices: Sequence[Device]) -> list[Finding]:
    narrow = [d for d in devices if 0 < d.pcie_width < d.pcie_width_max]
    if narrow:
        return [
            Finding(
                "PCIe width",
                "fail",
                ", ".join(f"GPU {d.index}: x{d.pcie_width} of x{d.pcie_width_max}" for d in narrow),
                "a link trained narrow: all-reduce and loading run at that share of the speed",
                "reseat the card or riser; look at the slot's bifurcation in the BIOS",
            )
        ]
    known = [d for d in devices if d.pcie_width]
    if not known:
        return [Finding("PCIe width", "skip", "the driver does not say")]
    widest = max(known, key=lambda d: d.pcie_width)
    return [Finding("PCIe width", "ok", f"x{widest.pcie_width}, up to generation {widest.pcie_generation_max}")]


def peer_access(access: Sequence[Sequence[bool]] | ProbeFailed, iommu: str) -> Finding:
    name = "peer access"
    if isinstance(access, ProbeFailed):
        return Finding(name, "fail", str(access), "the driver could not say", "look at dmesg for NVRM errors")
    missing = [(i, j) for i, row in enumerate(access) for j, yes in enumerate(row) if not yes]
    if missing:
        pairs = ", ".join(f"{i}-{j}" for i, j in missing[:6]) + (" ..." if len(missing) > 6 else "")
        return Finding(
            name,
            "warn",
            f"{len(missing)} ordered pairs cannot reach each other: {pairs}",
            "NCCL goes through host memory there: all-reduce latency doubles or worse, custom all-reduce is off",
            "BIOS: ACS off, large BAR on; kernel: iommu=pt; a driver that allows P2P on this board",
        )
    return Finding(name, "ok", f"all {len(access)} GPUs reach each other (iommu: {iommu})")


def copies(rows: Sequence[Copy] | ProbeFailed, iommu: str) -> Finding:
    """The check that CUDA does not do: a translating IOMMU can lose peer copies while every call reports success."""
    name = "integrity of peer copies"
    mend = (
        "do not serve with P2P: boot with iommu=pt (or amd_iommu=off) and ACS disabled, and run this again; "
        "until then NCCL_P2P_DISABLE=1 and custom all-reduce off"
    )
    if isinstance(rows, ProbeFailed):
        meaning = "a copy that hangs here hangs every all-reduce" if rows.hung else "copies between GPUs fail"
        return Finding(name, "fail", str(rows), meaning, mend)
    wrong = [c for c in rows if c.wrong]
    if wrong:
        bad = sorted({(c.source, c.target) for c in wrong})
        shown = ", ".join(f"{a}->{b}" for a, b in bad[:6]) + (" ..." if len(bad) > 6 else "")
        return Finding(
            name,
            "fail",
            f"{sum(c.wrong for c in wrong)} wrong bytes in {len(bad)} pairs ({shown}), though CUDA reported success; "
            f"iommu: {iommu}",
            "answers would be garbage without any error",
            mend,
        )
    pairs = {(c.source, c.target) for c in rows}
    slowest = min((c.bytes_per_s for c in rows if c.bytes > 1 << 24), default=0.0)
    return Finding(name, "ok", f"{len(pairs)} ordered pairs right, at least {slowest / 1e9:.1f} GB/s")


def first_collective(seconds: float | ProbeFailed) -> Finding:
    name = "first collective"
    if isinstance(seconds, ProbeFailed):
        meaning = (
            "NCCL hangs: the service would sit in start-up for ever"
            if seconds.hung
            else "tensor parallelism cannot work on this box"
        )
        return Finding(
            name,
            "fail",
            str(seconds),
            meaning,
            "NCCL_DEBUG=INFO shows the step; try NCCL_P2P_DISABLE=1 (IOMMU, ACS) and NCCL_SHM_DISABLE=1 (/dev/shm)",
        )
    status: Status = "ok" if seconds < 30 else "warn"
    meaning = "" if status == "ok" else "slow start of NCCL; replicas take this long to come back"
    return Finding(name, status, f"right after {seconds:.1f} s", meaning)


def bandwidth(rates: Sequence[float] | ProbeFailed, datasheet: float | None) -> Finding:
    name = "memory bandwidth"
    if isinstance(rates, ProbeFailed):
        return Finding(name, "fail", str(rates), "a plain sum over memory failed", "look at dmesg for Xid errors")
    typical, least = median(rates), min(rates)
    text = f"{least / 1e12:.2f} to {max(rates) / 1e12:.2f} TB/s"
    if least < 0.9 * typical:
        return Finding(
            name,
            "warn",
            f"{text}: GPU {list(rates).index(least)} is slow",
            "tensor parallelism runs at the pace of the slowest",
            "clocks, ECC errors (nvidia-smi -q -d ECC), another process",
        )
    if datasheet and typical < SLOW_READ * datasheet:
        return Finding(
            name,
            "warn",
            f"{text}, the datasheet says {datasheet / 1e12:.2f}",
            "decoding reads weights at this speed",
            "memory clock, power limit, another process",
        )
    return Finding(name, "ok", text)


def kernels(found: Kernels | ProbeFailed, has_gpus: bool) -> Finding:
    name = "GGUF kernels"
    if isinstance(found, ProbeFailed):
        return Finding(name, "fail", str(found), "the packages could not be asked", "reinstall the gpu extra")
    if not has_gpus:
        text = f"torch {found.torch or 'absent'}, vLLM {found.vllm or 'absent'}"
        return Finding(name, "skip", f"{text}: no GPU to run them")
    if not found.vllm or not found.plugin:
        return Finding(
            name,
            "fail",
            f"vLLM {found.vllm or 'absent'}, vllm-gguf-plugin {found.plugin or 'absent'}",
            "GGUF files cannot be served by vLLM",
            "pip install 'glm5-serve[gpu]'",
        )
    if not found.compiled:
        return Finding(
            name,
            "fail",
            f"the plugin's CUDA extension does not load: {found.fault}",
            "the plugin would fall back to Triton kernels without a word: 300 µs for a product that takes 11",
            f"install the torch that vllm-gguf-plugin {found.plugin} was built for (now torch {found.torch})",
        )
    return Finding(name, "ok", f"vLLM {found.vllm}, vllm-gguf-plugin {found.plugin} with its CUDA extension")


def host(h: Host, gpu_count: int) -> list[Finding]:
    need = max(1, gpu_count) * MIN_SHM_PER_GPU
    shm_ok = h.shm_free >= need
    files_ok = h.open_files < 0 or h.open_files >= MIN_OPEN_FILES
    locked_ok = gpu_count < 2 or h.locked_memory < 0 or h.locked_memory >= 1 << 30
    found = [
        Finding(
            "/dev/shm",
            "ok" if shm_ok else ("fail" if gpu_count > 1 else "warn"),
            f"{h.shm_free / 2**30:.2f} GiB free of {h.shm_bytes / 2**30:.2f}",
            "" if shm_ok else "NCCL and vLLM pass data between processes there; too little ends in SIGBUS",
            ""
            if shm_ok
            else f"docker --shm-size={need >> 30}g --ipc=host; Kubernetes: an emptyDir with medium: Memory",
        ),
        Finding(
            "open files",
            "ok" if files_ok else "warn",
            "unlimited" if h.open_files < 0 else str(h.open_files),
            "" if files_ok else "many clients and Ray's processes run out of file descriptors",
            "" if files_ok else f"ulimit -n {MIN_OPEN_FILES} (LimitNOFILE in a systemd unit)",
        ),
        Finding(
            "locked memory",
            "ok" if locked_ok else "warn",
            "unlimited" if h.locked_memory < 0 else f"{h.locked_memory / 2**20:.0f} MiB",
            "" if locked_ok else "NCCL pins host buffers; a small limit makes it fail or go slower",
            "" if locked_ok else "ulimit -l unlimited",
        ),
        Finding("CPU", "ok", f"{h.cpus} cores, {h.memory / 2**30:.0f} GiB, reads {h.memory_bandwidth / 1e9:.1f} GB/s"),
    ]
    if gpu_count:
        bad = h.iommu == "translated"
        found.append(
            Finding(
                "IOMMU",
                "warn" if bad else "ok",
                h.iommu,
                "translated DMA slows peer copies and can lose them" if bad else "",
                "boot with iommu=pt" if bad else "",
            )
        )
    if h.governor and h.governor not in ("performance", "schedutil"):
        found.append(
            Finding(
                "CPU governor",
                "warn",
                h.governor,
                "the host's launches are on the path of every step without CUDA graphs",
                "cpupower frequency-set -g performance",
            )
        )
    return found


def numa(devices: Sequence[Device], nodes: int) -> Finding:
    known = [d for d in devices if d.numa >= 0]
    if not known:
        return Finding("NUMA", "skip", f"{nodes} nodes; the GPUs' nodes are unknown")
    by: dict[int, list[int]] = {}
    for d in known:
        by.setdefault(d.numa, []).append(d.index)
    text = "; ".join(f"node {n}: GPUs {', '.join(map(str, gs))}" for n, gs in sorted(by.items()))
    if len(by) == 1 and nodes > 1:
        node = next(iter(by))
        return Finding(
            "NUMA",
            "warn",
            text,
            "all GPUs hang on one node: a process on another pays for every launch",
            f"start with numactl --cpunodebind={node} --membind={node}",
        )
    return Finding("NUMA", "ok", text)
