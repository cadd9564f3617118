"""Each fault that preflight knows, made by a probe, found, explained and mended; and the real probe's edges."""

# ruff: noqa: E501  (one fault a line)

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service.errors import UserError
from service.planning import hardware
from service.planning.step_model import step_model
from service.preflight import checks, jobs
from service.preflight.probe import Copy, ProbeFailed
from service.preflight.real import RealProbe, iommu, memory_bandwidth, parse_smi
from service.preflight.report import run
from tests.unit.preflight import probes
from tests.unit.preflight.probes import BoxProbe, change, fails, one_device


def test_a_healthy_box_passes_with_one_advice():
    report = run(BoxProbe())
    bad = {f.name: f for f in report.findings if f.status in ("warn", "fail")}
    assert set(bad) == {"all-reduce for latency"}  # LL is nearly twice as quick as NCCL's own choice at 12 to 48 KiB
    assert "NCCL_PROTO=LL" in bad["all-reduce for latency"].mend
    assert report.verdict == "warn"
    throughput = next(f for f in report.findings if f.name == "all-reduce for throughput")
    assert throughput.status == "ok"  # at megabytes LL loses


FAULTS: list[tuple[str, dict[str, Any], str, str, str, str]] = [
    # id, faults, finding, status, in its text, in its mend
    ("no torch", {"devices": fails("devices: ModuleNotFoundError: torch")}, "GPUs", "warn", "ModuleNotFound", "gpu extra"),
    ("driver hangs", {"devices": fails("killed", hung=True)}, "GPUs", "fail", "killed", "driver"),
    ("no gpus", {"devices": lambda _: []}, "GPUs", "warn", "none", "box that will serve"),
    ("mixed", {"devices": one_device(name="NVIDIA H200", memory=150 << 30)}, "GPUs", "warn", "3: NVIDIA H200", "equal"),
    ("old driver", {"devices": lambda d: [x.__class__(**{**_dict(x), "driver": "550.54"}) for x in d]}, "driver", "fail", "550", "570"),
    ("memory taken", {"devices": one_device(used=30 << 30)}, "GPU memory in use", "warn", "GPU 3: 30.0", "nvidia-smi"),
    ("throttled", {"devices": one_device(throttle="hardware thermal")}, "clocks", "warn", "GPU 3", "cooling"),
    ("narrow link", {"devices": one_device(pcie_width=4)}, "PCIe width", "fail", "x4 of x16", "riser"),
    ("no p2p", {"peer_access": lambda a: [[i == j for j in range(8)] for i in range(8)]}, "peer access", "warn", "56 ordered pairs", "iommu=pt"),
    ("p2p unknown", {"peer_access": fails("peer_access: driver error")}, "peer access", "fail", "driver error", "dmesg"),
    ("lost copies", {"copies": probes.lost_copies}, "integrity of peer copies", "fail", "0->5, 5->0", "iommu=pt"),
    ("copy hangs", {"copies": fails("copying from GPU 2 to GPU 6: killed", hung=True)}, "integrity of peer copies", "fail", "GPU 2 to GPU 6", "NCCL_P2P_DISABLE=1"),
    ("nccl hangs", {"first_collective": fails("killed", hung=True)}, "first collective", "fail", "killed", "NCCL_DEBUG=INFO"),
    ("nccl wrong", {"first_collective": fails("wrong sum")}, "first collective", "fail", "wrong sum", "NCCL_P2P_DISABLE"),
    ("nccl slow", {"first_collective": lambda _: 45.0}, "first collective", "warn", "45.0 s", ""),
    ("collapse", {"allreduce": probes.collapsed}, "all-reduce nccl", "fail", "504 µs at 64 KiB", "algorithm"),
    ("ll hangs", {"allreduce": probes.one_algorithm_hangs}, "all-reduce nccl-ll", "fail", "killed", "do not select"),
    ("one slow gpu", {"read_bandwidth": lambda r: [*r[:3], 0.7e12, *r[4:]]}, "memory bandwidth", "warn", "GPU 3", "ECC"),
    ("all slow", {"read_bandwidth": lambda r: [0.9e12] * 8}, "memory bandwidth", "warn", "datasheet says 1.79", "power"),
    ("no read", {"read_bandwidth": fails("CUDA error")}, "memory bandwidth", "fail", "CUDA error", "Xid"),
    ("no plugin", {"kernels": change(plugin="", compiled=False)}, "GGUF kernels", "fail", "absent", "glm5-serve[gpu]"),
    ("fallback", {"kernels": change(compiled=False, fault="ImportError: undefined symbol")}, "GGUF kernels", "fail", "undefined symbol", "built for"),
    ("no packages", {"kernels": fails("kernels: boom")}, "GGUF kernels", "fail", "boom", "reinstall"),
    ("small shm", {"host": change(shm_bytes=64 << 20, shm_free=64 << 20)}, "/dev/shm", "fail", "0.06 GiB", "--shm-size=8g"),
    ("few files", {"host": change(open_files=1024)}, "open files", "warn", "1024", "ulimit -n 65536"),
    ("memlock", {"host": change(locked_memory=8 << 20)}, "locked memory", "warn", "8 MiB", "ulimit -l"),
    ("iommu", {"host": change(iommu="translated")}, "IOMMU", "warn", "translated", "iommu=pt"),
    ("powersave", {"host": change(governor="powersave")}, "CPU governor", "warn", "powersave", "performance"),
    ("one node", {"devices": lambda d: [x.__class__(**{**_dict(x), "numa": 1}) for x in d]}, "NUMA", "warn", "node 1", "--cpunodebind=1"),
]  # fmt: skip


def _dict(device: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(device)


@pytest.mark.parametrize(
    ("faults", "name", "status", "found", "mend"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_each_fault_is_found_explained_and_mended(
    faults: dict[str, Any], name: str, status: str, found: str, mend: str
):
    healthy = {f.name: f.status for f in run(BoxProbe()).findings}
    assert healthy.get(name, "ok") in ("ok", "skip"), "the fault must make the difference"
    finding = next(f for f in run(BoxProbe(faults)).findings if f.name == name)
    assert finding.status == status
    assert found in finding.found
    assert mend in finding.mend
    assert finding.meaning


def test_after_a_hanging_collective_no_other_is_tried():
    asked: list[str] = []

    def record(healthy: Any, name: str) -> Any:
        asked.append(name)
        return healthy

    run(BoxProbe({"first_collective": fails("killed", hung=True), "allreduce": record}))
    assert not asked


def test_quick_leaves_the_tables_out():
    report = run(BoxProbe(), quick=True)
    assert not report.tables
    assert report.verdict == "ok"


def test_planning_reads_the_json_instead_of_the_catalogue(tmp_path: Path):
    tree = run(BoxProbe({"read_bandwidth": lambda r: [*r[:7], 1.5e12]})).to_json("2026-11-29T00:00:00+00:00")
    path = tmp_path / "preflight.json"
    path.write_text(json.dumps(tree))
    box = hardware.box(str(path))
    assert box.gpus == 8
    assert box.measured_by_preflight
    assert box.trust == "measured"
    assert box.gpu.readable == pytest.approx(1.5e12)  # the slowest card
    assert box.link.default.seconds(12288) == pytest.approx(48.2e-6)
    assert box.link.pick("best", 12288).name == "nccl-ll"
    assert box.link.algorithms["nccl-ll"].setting == {"NCCL_PROTO": "LL"}
    model = step_model("glm-5", str(path))
    assert model.split(1).allreduce == pytest.approx(157 * 48.2e-6)
    assert model.split(1).weights == pytest.approx(model.read_bytes(1) / 1.5e12)


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "not JSON"), ("[]", "not a preflight"), ('{"format": "glm5-preflight/1"}', "damaged")],
)
def test_a_broken_json_is_refused(tmp_path: Path, text: str, word: str):
    path = tmp_path / "preflight.json"
    path.write_text(text)
    with pytest.raises(UserError, match=word):
        hardware.box(str(path))


def test_what_vllm_takes_by_itself_needs_no_setting(tmp_path: Path):
    """Its own kernel beats NCCL wherever vLLM turns it on: nothing to do, and planning counts with it."""
    custom = ((4096, 6.8), (12288, 7.4), (65536, 8.1), (131072, 7.5), (262144, 8.0), (3145728, 17.9))

    nccl = (*probes.NCCL, (12 << 20, 400.0))

    def answer(healthy, name):
        table = {"vllm-custom": custom, "nccl": nccl}.get(name, healthy.table)
        return replace(healthy, table=table, missing="" if table else healthy.missing)

    report = run(BoxProbe({"allreduce": answer}))
    found = {f.name: f for f in report.findings}
    assert found["all-reduce for latency"].status == found["all-reduce for throughput"].status == "ok"
    assert "7 µs by vllm-custom" in found["all-reduce for latency"].found
    path = tmp_path / "box.json"
    path.write_text(json.dumps(report.to_json("2026-11-30")))
    model = step_model("glm-5", str(path), tp=8)
    assert model.split(1).allreduce == pytest.approx(157 * 7.4e-6)
    # whole prompts are beyond its own kernel: NCCL's time from there on
    assert model.box.link.default.seconds(12 << 20) == pytest.approx(400e-6)


def test_a_cpu_box_from_preflight(tmp_path: Path):
    tree = run(BoxProbe({"devices": lambda _: []})).to_json("2026-11-29T00:00:00+00:00")
    path = tmp_path / "preflight.json"
    path.write_text(json.dumps(tree))
    box = hardware.box(str(path))
    assert box.gpu.is_cpu
    assert box.gpu.bandwidth == 4e11


# -- the real probe


def test_this_machine_without_gpus_says_so(tmp_path: Path):
    """The command itself, on a machine that has torch for CPUs only."""
    from service.preflight.cli import app

    path = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["--json", "-o", str(path)])
    assert result.exit_code == 0, result.output
    tree = json.loads(path.read_text())
    by = {c["name"]: c for c in tree["checks"]}
    assert by["GPUs"]["status"] == "warn"
    assert "none" in by["GPUs"]["found"]
    assert tree["memory_bandwidth"] > 1e9
    assert hardware.box(str(path)).gpu.is_cpu


def test_a_hanging_child_is_killed_with_its_group_and_its_lines_are_kept(tmp_path: Path):
    """A driver that hangs: the child says where it is, starts a grandchild, and never ends."""
    shim = tmp_path / "service" / "preflight"
    shim.mkdir(parents=True)
    pid_file = tmp_path / "pid"
    (shim.parent / "__init__.py").touch()
    (shim / "__init__.py").touch()
    (shim / "jobs.py").write_text(
        "import subprocess, sys, time\n"
        'print(\'{"source": 0, "target": 1, "bytes": 4, "wrong": 0, "bytes_per_s": 1.0}\')\n'
        "print('{\"trying\": [1, 0]}', flush=True)\n"
        f"p = subprocess.Popen(['sleep', '60']); open({str(pid_file)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(60)\n"
    )
    probe = RealProbe(dict(os.environ), timeout_s=2.0, folder=tmp_path)
    began = time.monotonic()
    with pytest.raises(ProbeFailed, match="from GPU 1 to GPU 0") as caught:
        probe.copies()
    assert caught.value.hung
    assert time.monotonic() - began < 15
    for _ in range(100):
        if not _alive(int(pid_file.read_text())):
            break
        time.sleep(0.05)
    assert not _alive(int(pid_file.read_text()))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failing_child_is_told_by_its_last_line():
    probe = RealProbe(dict(os.environ), timeout_s=60)
    lines, fault = probe._run("no_such_job", [{}], 60)
    assert lines == []
    assert fault is not None
    assert "KeyError: 'no_such_job'" in str(fault)


def test_children_keep_nvlink_multicast_off():
    assert RealProbe({})._environment["NCCL_NVLS_ENABLE"] == "0"
    assert RealProbe({"NCCL_NVLS_ENABLE": "2"})._environment["NCCL_NVLS_ENABLE"] == "2"  # the operator's word stands


def test_patterns_differ_by_place_and_seed():
    torch = pytest.importorskip("torch")
    a, b = jobs._pattern(100_000, 1, "cpu"), jobs._pattern(100_000, 2, "cpu")
    assert int((a == b).sum()) == 0
    assert int((a[1:] == a[:-1]).sum()) == 0
    assert a.dtype == torch.int32


def test_nvidia_smi_rows():
    text = "0, 580.159.04, 345, 1980, 0x0000000000000041, 5, 5, 16, 16, 512, 00000000:0A:00.0\n1, [N/A], x\n"
    row = parse_smi(text)[0]
    assert row["driver"] == "580.159.04"
    assert row["throttle"] == "hardware thermal"  # 0x40; 0x1 (idle) is no trouble
    assert row["used"] == 512 << 20
    assert 1 not in parse_smi(text)


def test_host_figures_are_plausible():
    assert 5e8 < memory_bandwidth(2) < 1e13
    assert iommu() in ("off", "passthrough", "translated", "unknown")


def test_copies_report_the_slowest_large_copy():
    rows = [Copy(0, 1, 1 << 26, 0, 2e10), Copy(1, 0, 1 << 26, 0, 1e10), Copy(0, 1, 4, 0, 1.0)]
    assert "10.0 GB/s" in checks.copies(rows, "off").found


def test_the_command_needs_no_gpu_packages_to_explain_itself():
    done = subprocess.run(
        [".venv/bin/glm5", "preflight", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 127:
        pytest.skip("the command is not installed")
    assert "integrity" in done.stdout
