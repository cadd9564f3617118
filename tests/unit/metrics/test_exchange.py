"""Between processes: totals are exact sums, never fall when a process leaves, and are text that Prometheus reads."""

from __future__ import annotations

import shutil
import subprocess

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.metrics import labels
from service.metrics.declared import Metrics
from service.metrics.exchange import Update, fold, merge, snapshot, updates
from service.metrics.recorders import IngressRecorder, ReplicaRecorder
from service.types import Delta, EngineStats
from tests.unit.metrics.read import Clock, Samples, read, samples, total, value


def process(tokens: int, pool: str = "shared", running: int = 1) -> Metrics:
    """A replica and an ingress in one process, with `tokens` tokens served in one second."""
    clock, metrics = Clock(), Metrics()
    replica, ingress = ReplicaRecorder(metrics, pool, 8, clock), IngressRecorder(metrics, clock)
    with ingress.request("chat") as outer, replica.request("default") as inner:
        clock.pass_(0.15)
        for _ in range(tokens):
            inner.chunk(Delta(output_tokens=1))
            outer.chunk(Delta(output_tokens=1))
        clock.pass_(1.0)
    replica.engine(EngineStats(8, running=running, kv_used=running / 10))
    return metrics


def counters(found: Samples) -> dict[object, float]:
    endings = ("_total", "_count", "_sum", "_bucket")
    return {key: v for key, v in found.items() if key[0].endswith(endings)}


def test_counters_and_histograms_add_up_and_gauges_as_declared() -> None:
    found = samples(merge([snapshot(process(3, running=1)), snapshot(process(5, running=4))]))
    assert value(found, "glm_output_tokens_total", pool="shared", tier="default") == 8
    assert value(found, "glm_busy_seconds_by_concurrency_total", pool="shared", concurrency="1") == pytest.approx(2.0)
    assert value(found, "glm_ttft_seconds_count", pool="none", tier="none") == 2
    assert value(found, "glm_ttft_seconds_bucket", pool="none", tier="none", le="0.1") == 0
    assert value(found, "glm_ttft_seconds_bucket", pool="none", tier="none", le="0.2") == 2
    assert value(found, "glm_slots", pool="shared") == 16  # sum
    assert value(found, "glm_requests_running", pool="shared") == 5  # sum
    assert value(found, "glm_kv_used_ratio", pool="shared") == 0.4  # the fullest


def test_merging_equals_one_process_that_did_it_all() -> None:
    """Prometheus client's own exposition of one registry is the reference."""
    from prometheus_client import generate_latest

    metrics = process(7)
    ours = read(metrics)
    theirs = {k: v for k, v in samples(generate_latest(metrics.registry)).items() if not k[0].endswith("_created")}
    assert {k: v for k, v in ours.items() if k[0] != "glm_metrics_snapshots_ignored"} == theirs


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_text() -> None:
    text = merge([snapshot(process(3))], ["# HELP llamacpp:x X.\n# TYPE llamacpp:x gauge\nllamacpp:x 1\n"] * 2)
    told = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30)
    # promtool's lint of style objects to colons in the engines' own names; anything else is ours.
    faults = [line for line in (told.stdout + told.stderr).decode().splitlines() if "llamacpp:" not in line]
    assert faults == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["shared", "latency"])), min_size=1, max_size=6), st.data()
)
def test_totals_do_not_fall_when_processes_leave(plan: list[tuple[int, str]], data: st.DataObject) -> None:
    live = [snapshot(process(tokens, pool)) for tokens, pool in plan]
    base = b""
    before = samples(merge(live))
    while live:
        base = fold(base, live.pop(data.draw(st.integers(0, len(live) - 1))))
        after = samples(merge([base, *live]))
        assert counters(after) == pytest.approx(counters(before))
        assert total(after, "glm_slots") == 8 * len(live)  # gauges leave with their process
    assert total(after, "glm_output_tokens_total") == sum(tokens for tokens, _ in plan)


def test_the_base_is_bounded() -> None:
    leaving = snapshot(process(3))
    base = fold(b"", leaving)
    first = len(base)
    for _ in range(2000):
        base = fold(base, leaving)
    assert len(base) < 1.5 * first
    assert total(samples(merge([base])), "glm_output_tokens_total") == 2001 * 3


def test_a_snapshot_of_another_version_is_left_out_and_said() -> None:
    ours, other = snapshot(process(3)), orjson.loads(snapshot(process(5)))
    other["schema"] = "0123456789ab"
    found = samples(merge([ours, orjson.dumps(other)]))
    assert total(found, "glm_output_tokens_total") == 3
    assert value(found, "glm_metrics_snapshots_ignored") == 1
    assert total(samples(merge([fold(ours, orjson.dumps(other))])), "glm_output_tokens_total") == 3


def replay(found: list[Update], into: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
    for update in found:
        key = (update.name, frozenset(update.labels))
        into[key] = into.get(key, 0.0) + update.value if update.kind == "counter" else update.value


def test_updates_replayed_give_the_same_totals() -> None:
    """A sink that takes increments (Ray's agent) ends up with what our own text says."""
    clock, metrics = Clock(), Metrics()
    replica, ingress = ReplicaRecorder(metrics, "shared", 8, clock), IngressRecorder(metrics, clock)
    sink: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    last = b""
    for turn in range(5):
        with ingress.request("chat") as outer, replica.request("flex") as inner:
            for _ in range(turn):
                clock.pass_(0.02)
                inner.chunk(Delta(output_tokens=2, prompt_tokens=1))
                outer.chunk(Delta(output_tokens=2))
        replica.engine(EngineStats(8, running=turn))
        now = snapshot(metrics)
        found = updates(last, now)
        assert all(update.value > 0 for update in found if update.kind == "counter")
        replay(found, sink)
        last = now
    assert {update.kind for update in updates(last, snapshot(metrics))} == {"gauge"}  # said again each time
    ours = {k: v for k, v in read(metrics).items() if v}
    assert {k: v for k, v in sink.items() if v} == pytest.approx(
        {k: v for k, v in ours.items() if k[0] != "glm_metrics_snapshots_ignored"}
    )


NATIVE = """# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a, \\"b\\" {c}"} 3.0
# HELP vllm:generation_tokens_total Tokens.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 1.5e3
# HELP process_cpu_seconds_total Clashes with the process of the ingress.
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 9.0
llamacpp:tokens_predicted_total 12
this is not a sample
"""


def test_native_text_of_two_replicas() -> None:
    text = merge([], {"r1": NATIVE, "r2": NATIVE})
    found = samples(text)
    for replica in ("r1", "r2"):
        assert value(found, "vllm:generation_tokens_total", engine="0", replica=replica) == 1500
        assert value(found, "llamacpp:tokens_predicted_total", replica=replica) == 12
        assert total(found, "vllm:num_requests_running", replica=replica, model_name='a, "b" {c}') == 3
    assert text.count(b"# TYPE vllm:num_requests_running") == 1
    assert b"process_cpu" not in text
    assert b"not a sample" not in text
    lines = text.decode().splitlines()
    where = [i for i, line in enumerate(lines) if line.startswith("vllm:num_requests_running")]
    assert where[1] == where[0] + 1  # a family stands together


def test_label_values_need_no_escaping() -> None:
    closed = [value for value in vars(labels).values() if isinstance(value, tuple)]
    words = [word for group in closed for word in group if isinstance(word, str)]
    assert len(words) > 80
    assert not [word for word in words if set(word) & set('"\\\n,={}')]
