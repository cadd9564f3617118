"""The whole preflight: ask the probe, judge, and write what planning reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from service.errors import UserError
from service.planning import hardware
from service.planning.measured import FORMAT, part_name
from service.preflight import allreduce, checks
from service.preflight.checks import Finding
from service.preflight.probe import ALGORITHMS, AllReduce, Device, Host, Probe, ProbeFailed

HIDDEN = 6144  # GLM-5's hidden size: what one token's all-reduce carries, in bf16
T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """Findings in order, and the measured figures."""

    host: Host
    devices: tuple[Device, ...]
    findings: tuple[Finding, ...]
    read_bandwidth: tuple[float, ...]
    tables: dict[str, AllReduce]

    @property
    def verdict(self) -> str:
        """ "fail" if anything failed, else "warn" if anything should be mended, else "ok"."""
        found = {f.status for f in self.findings}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"

    def to_json(self, date: str) -> dict[str, Any]:
        """What planning.measured reads, with the findings. `date`: ISO 8601."""
        rates = self.read_bandwidth or (0.0,) * len(self.devices)
        tables = {name: [list(row) for row in t.table] for name, t in self.tables.items() if t.table}
        own = allreduce.engines_own(tables)
        if own != "nccl":
            # messages of whole prompts, which its own kernel refuses, go to NCCL
            last = tables[own][-1][0]
            tables[own] += [row for row in tables.get("nccl", []) if row[0] > last]
        return {
            "format": FORMAT,
            "date": date,
            "host": self.host.name,
            "cpus": self.host.cpus,
            "memory": self.host.memory,
            "memory_bandwidth": round(self.host.memory_bandwidth),
            "verdict": self.verdict,
            "gpus": [asdict(d) | {"read_bandwidth": round(r)} for d, r in zip(self.devices, rates, strict=False)],
            "allreduce": tables,
            "allreduce_settings": {name: t.settings for name, t in self.tables.items() if t.settings},
            "default_allreduce": own,
            "checks": [asdict(f) for f in self.findings],
        }


def run(probe: Probe, say: Say = lambda _: None, *, quick: bool = False, hidden: int = HIDDEN) -> Report:
    """Everything in order of what depends on what. Never raises for a machine's faults: they become findings. `quick`
    skips the all-reduce tables. `say` is told what is going on."""
    say("host")
    host = probe.host()
    say("GPUs")
    devices = _try(probe.devices)
    findings = checks.gpus(devices)
    found = [] if isinstance(devices, ProbeFailed) else list(devices)
    count = len(found)
    say("kernels")
    findings.append(checks.kernels(_try(probe.kernels), count > 0))
    rates: list[float] = []
    tables: dict[str, AllReduce] = {}
    if count:
        say("memory bandwidth")
        measured = _try(probe.read_bandwidth)
        findings.append(checks.bandwidth(measured, _datasheet(found[0].name)))
        rates = [] if isinstance(measured, ProbeFailed) else list(measured)
        findings.append(checks.numa(found, host.numa_nodes))
    if count > 1:
        say("peer access")
        findings.append(checks.peer_access(_try(probe.peer_access), host.iommu))
        say("integrity of peer copies")
        findings.append(checks.copies(_try(probe.copies), host.iommu))
        say("first collective")
        first = _try(probe.first_collective)
        findings.append(checks.first_collective(first))
        if isinstance(first, ProbeFailed):
            findings.append(Finding("all-reduce tables", "skip", "the first collective did not work"))
        elif not quick:
            answers: dict[str, AllReduce | ProbeFailed] = {}
            for name in ALGORITHMS:
                say(f"all-reduce {name}")
                answers[name] = _try(lambda name=name: probe.allreduce(name))  # type: ignore[misc]
            findings += allreduce.findings(answers, hidden)
            tables = {k: v for k, v in answers.items() if isinstance(v, AllReduce)}
    elif count == 1:
        findings.append(Finding("links", "skip", "one GPU: nothing to join"))
    findings += checks.host(host, count)
    return Report(host, tuple(found), tuple(findings), tuple(rates), tables)


def _try(ask: Callable[[], T]) -> T | ProbeFailed:
    try:
        return ask()
    except ProbeFailed as fault:
        return fault


def _datasheet(name: str) -> float | None:
    try:
        return hardware.gpu(part_name(name)).bandwidth
    except UserError:
        return None
