"""The declarations keep their own rules, and what they promise to cost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from service.metrics.declared import Metrics
from service.metrics.exchange import snapshot
from service.metrics.recorders import IngressRecorder, ReplicaRecorder
from service.types import Chunk
from tests.unit.metrics.read import by, read

LABELS = {"pool", "tier", "concurrency", "phase", "endpoint", "outcome", "reason", "direction", "mode", "done"}
UNITS = ("_seconds", "_tokens_total", "_ratio", "_seconds_by_concurrency_total", "_tokens_by_concurrency_total")
COUNTED = ("_requests", "_starts", "_rejections", "_decisions")
GAUGES = {"slots", "requests_running", "requests_waiting", "requests_decoding", "requests_in_flight", "requests_queued"}
BARE = {f"glm_{name}" for name in (*GAUGES, "replicas_ready", "replicas_target", "replicas_max", "kernel_fallback")}


def test_names_carry_prefix_and_unit_and_labels_are_known() -> None:
    metrics = Metrics()
    for name, (kind, text, merging) in metrics.schema.items():
        assert re.fullmatch(r"glm_[a-z0-9_]+", name)
        assert name.endswith(UNITS) or name.removesuffix("_total").endswith(COUNTED) or name in BARE, name
        assert (kind == "counter") == name.endswith("_total"), name
        assert (merging in ("sum", "max")) == (kind == "gauge"), name
        assert text.endswith("."), name
    for metric in vars(metrics).values():
        assert set(getattr(metric, "_labelnames", ())) <= LABELS


def test_two_processes_share_nothing() -> None:
    a, b = Metrics(), Metrics()
    ReplicaRecorder(a, "shared", 1)
    assert by(read(a), "glm_replica_starts_total", "pool") == {"shared": 1}
    assert by(read(b), "glm_replica_starts_total", "pool") == {}


def best_us(run: Callable[[], object], times: int) -> float:
    """CPU time of one call, the least of many short batches: the machine's other work only ever adds."""
    found = []
    for _ in range(40):
        start = time.thread_time()
        for _ in range(times):
            run()
        found.append((time.thread_time() - start) / times * 1e6)
    return min(found)


def test_a_token_costs_under_two_microseconds_in_a_replica() -> None:
    metrics = Metrics()
    chunk = Chunk(b"", 1)
    with ReplicaRecorder(metrics, "shared", 8).request("default") as request:
        cost = best_us(lambda: request.chunk(chunk), 2_000)
    print(f"{cost:.2f} us a token in the replica")
    assert cost < 2.0


def test_ingress_and_snapshot_stay_cheap() -> None:
    metrics = Metrics()
    chunk = Chunk(b"", 1)
    ReplicaRecorder(metrics, "shared", 8)
    with IngressRecorder(metrics).request("chat") as request:
        per_token = best_us(lambda: request.chunk(chunk), 1_000)
    per_snapshot = best_us(lambda: snapshot(metrics), 5)
    print(f"{per_token:.2f} us a token in the ingress, {per_snapshot / 1000:.2f} ms a snapshot")
    assert per_token < 6.0
    assert per_snapshot < 20_000
