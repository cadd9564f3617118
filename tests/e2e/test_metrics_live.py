"""Every panel and rule against a real Prometheus that scrapes a real service under real traffic."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from dashboards import build, check
from dashboards.known_names import KNOWN, from_exposition
from service.metrics.labels import CONCURRENCY, concurrency_index
from tests.e2e.gpu_stand_in import GpuStandIn
from tests.e2e.prometheus import Prometheus, exporter, prometheus
from tests.e2e.traffic import Level, run_level
from tests.service import GLM5, Service
from tests.unit.metrics.read import Samples, by, samples, total

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="the Debian package prometheus is not installed"),
]

LIVE, GPU = "glm5", "glm5-gpu"
LEVELS = ((1, 240), (2, 150), (4, 100), (8, 64))
"""(streams at once, tokens each): some seconds each on two cores."""
QUIET_S = 3.5
WEEK_S = 7 * 86_400

ELSEWHERE = (
    *("vllm:", "DCGM_", "glm_kv_used_ratio", "glm_speculative_", "glm_decode_step_predicted_seconds"),
    *("glm_conversion_decisions_total", "glm_scaling_decisions_total", "glm_replicas_target", "glm_replicas_max"),
)
"""What llama.cpp with a fixed number of replicas cannot fill: evaluated on the stand-in of a GPU box."""


@dataclass(frozen=True)
class Proof:
    """What the module's one run of traffic left behind."""

    service: Service
    prometheus: Prometheus
    levels: dict[int, Level]
    edges: dict[int, tuple[Samples, Samples]]
    """/metrics just before and just after each level, its quiet time included."""
    before: Samples
    after: Samples
    asked_at: float


def scrape(service: Service) -> str:
    return httpx.get(f"{service.url}/metrics", timeout=20.0).text


def history(now: float) -> str:
    """A week-old hour of the core pair, 50 tok/s at every concurrency, as OpenMetrics."""
    times = [now - WEEK_S - 4200 + 60 * step for step in range(100)]
    lines = []
    for family, per_minute in (
        ("glm_output_tokens_by_concurrency", 3000),
        ("glm_busy_seconds_by_concurrency", 60),
    ):
        lines += [f"# TYPE {family} counter"]
        for concurrency in CONCURRENCY:
            labels = f'job="{LIVE}",instance="old",pool="shared",concurrency="{concurrency}"'
            lines += [f"{family}_total{{{labels}}} {per_minute * at} {when:.3f}" for at, when in enumerate(times)]
    lines += ["# TYPE glm_output_tokens counter"]
    lines += [
        f'glm_output_tokens_total{{job="{LIVE}",instance="old",pool="shared",tier="default"}} {9000 * at} {when:.3f}'
        for at, when in enumerate(times)
    ]
    return "\n".join((*lines, "# EOF\n"))


@pytest.fixture(scope="module")
def proof(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    targets = {LIVE: f"{service.url}/metrics"}
    with exporter(GpuStandIn().text) as gpu:
        folder = tmp_path_factory.mktemp("prometheus")
        with prometheus(folder, {**targets, GPU: gpu}, history(time.time())) as there:
            for job in (LIVE, GPU):
                there.wait(f'up{{job="{job}"}}', lambda found: bool(found) and found[0]["value"][1] == "1", 15.0)
            run_level(service.url, service.model, 8, 8)  # warm
            time.sleep(QUIET_S)  # its end must not lie in the first level's window
            before = samples(scrape(service))
            levels, edges, edge = {}, {}, before
            for at_once, tokens in LEVELS:
                levels[at_once] = run_level(service.url, service.model, at_once, tokens)
                time.sleep(QUIET_S)  # scrapes without traffic on either side of each level
                edges[at_once] = (edge, edge := samples(scrape(service)))
            run_level(service.url, service.model, 2, 20, "priority")
            run_level(service.url, service.model, 2, 20, "flex")
            time.sleep(2.2)
            yield Proof(service, there, levels, edges, before, samples(scrape(service)), time.time())


def grown(proof: Proof, name: str, **labels: str) -> float:
    return total(proof.after, name, **labels) - total(proof.before, name, **labels)


def fill(expression: str, job: str) -> str:
    """Grafana's variables, as a viewer would have set them."""
    for variable, value in {"$job": job, "$pool": ".*", "$box": ".*", "$__rate_interval": "2m"}.items():
        expression = expression.replace(variable, value)
    return expression


# ---------------------------------------------------------------- figures


def test_counts_are_exact(proof: Proof) -> None:
    """What clients were told they got, to the token."""
    output = sum(level.output_tokens for level in proof.levels.values())
    prompt = sum(stream.prompt_tokens for level in proof.levels.values() for stream in level.streams)
    assert output == sum(at_once * tokens for at_once, tokens in LEVELS)
    assert grown(proof, "glm_output_tokens_total", tier="default") == output
    assert grown(proof, "glm_prompt_tokens_total", tier="default") == prompt
    assert grown(proof, "glm_output_tokens_total") == output + 80
    assert grown(proof, "glm_output_tokens_by_concurrency_total") == pytest.approx(output + 80)
    requests = sum(at_once for at_once, _ in LEVELS)
    assert grown(proof, "glm_requests_total", outcome="ok", tier="default") == requests
    assert grown(proof, "glm_ttft_seconds_count", tier="default") == requests
    assert total(proof.after, "glm_requests_in_flight") == total(proof.after, "glm_requests_decoding") == 0


@pytest.mark.parametrize("at_once", [at_once for at_once, _ in LEVELS])
def test_tokens_per_second_at_a_concurrency_are_its_tokens_over_its_seconds(proof: Proof, at_once: int) -> None:
    """The panel's own expression, over the level's window, at the bucket of this concurrency: what /metrics itself said
    just before and just after the level. How near that comes to what a client measures: benchmarks/metrics_live.py."""
    level = proof.levels[at_once]
    bucket = CONCURRENCY[concurrency_index(at_once)]
    before, after = proof.edges[at_once]

    def grown_here(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    tokens = grown_here("glm_output_tokens_by_concurrency_total", concurrency=bucket)
    busy = grown_here("glm_busy_seconds_by_concurrency_total", concurrency=bucket)
    # Every token is in some bucket, most of them in this one; no second is counted twice.
    assert grown_here("glm_output_tokens_by_concurrency_total") == pytest.approx(level.output_tokens)
    assert tokens > level.output_tokens / 2
    assert 0 < busy < grown_here("glm_busy_seconds_by_concurrency_total") + 1e-6
    assert grown_here("glm_busy_seconds_by_concurrency_total") <= level.seconds
    panel = next(p for p in build.boards()["serving.json"].panels if p.title == "Tok/s of a replica by concurrency")
    # From two seconds before the first request to just before the next level.
    window = f"[{math.ceil(level.seconds + QUIET_S + 1.8)}s]"
    expression = fill(panel.queries[0].expr, LIVE).replace("[2m]", window)
    found = by_concurrency(proof.prometheus, expression, level.ended_at + QUIET_S - 0.2)
    # Both counters stand still at the window's ends. Prometheus extrapolates each by half a scrape at both ends, but
    # no further than to its zero, which is nearer for one than for the other: a seventh of so short a window at most.
    assert found[bucket] == pytest.approx(tokens / busy, rel=0.15)


def test_latencies_lie_within_what_the_client_saw(proof: Proof) -> None:
    """TTFT and E2EL as means: each of ours begins after the client's and ends before it."""
    streams = [stream for level in proof.levels.values() for stream in level.streams]
    means = {}
    for histogram, seen in (
        ("glm_ttft_seconds", [stream.first - stream.sent for stream in streams]),
        ("glm_e2el_seconds", [stream.end - stream.sent for stream in streams]),
    ):
        mean = grown(proof, f"{histogram}_sum", tier="default") / grown(proof, f"{histogram}_count", tier="default")
        assert 0 < mean <= sum(seen) / len(seen), histogram
        means[histogram] = mean
    assert means["glm_ttft_seconds"] < means["glm_e2el_seconds"]


def test_the_last_token_of_an_answer_comes_into_the_metrics(proof: Proof) -> None:
    """Without a further request. How soon is the machine's affair; the deadline only ends a wait for nothing."""
    before = samples(scrape(proof.service))
    level = run_level(proof.service.url, proof.service.model, 1, 12)
    ended = time.monotonic()
    wanted = total(before, "glm_output_tokens_total") + level.output_tokens
    while (counted := total(samples(scrape(proof.service)), "glm_output_tokens_total")) < wanted:
        assert time.monotonic() - ended < 30.0, (counted, wanted)
        time.sleep(0.01)
    assert counted == wanted
    print(f"complete after {(time.monotonic() - ended) * 1000:.0f} ms")


# ---------------------------------------------------------------- panels, rules, names


QUERIES = [
    pytest.param(query.expr, id=f"{board.uid}: {panel.title} {at}")
    for board in build.boards().values()
    for panel in board.panels
    for at, query in enumerate(panel.queries)
]


@pytest.mark.parametrize("expression", QUERIES)
def test_every_panel_shows_something(proof: Proof, expression: str) -> None:
    job = GPU if any(name in expression for name in ELSEWHERE) else LIVE
    found = proof.prometheus.query(fill(expression, job), proof.asked_at)
    assert found
    assert any(not math.isnan(float(one["value"][1])) for one in found)


def test_names_in_panels_and_alerts_exist_in_the_live_scrape(proof: Proof) -> None:
    assert check.run(scrape(proof.service)) == []
    told = subprocess.run(
        [GLM5, "dashboards", "check", "--metrics", f"{proof.service.url}/metrics", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert json.loads(told.stdout)["faults"] == []


def test_the_list_of_llama_cpp_is_what_it_exposes(proof: Proof) -> None:
    there = from_exposition(scrape(proof.service))
    listed = [line.split()[0] for line in (KNOWN / "llamacpp.txt").read_text().splitlines() if line[0] != "#"]
    assert set(listed) <= set(there)


def test_rules_evaluate_and_nothing_fires_that_should_not(proof: Proof) -> None:
    rules = proof.prometheus.rules()
    assert {rule["name"] for rule in rules} >= {"GlmNoReadyReplica", "glm:output_tokens_per_second:at_concurrency_5m"}
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert firing <= {"GlmKvPreemption"}, firing  # the stand-in preempts at every reading
    recorded = by_concurrency(proof.prometheus, 'glm:output_tokens_per_second:at_concurrency_5m{job="glm5"}')
    assert {"1", "2", "3-4", "5-8"} <= set(recorded)


def by_concurrency(there: Prometheus, expression: str, at: float | None = None) -> dict[str, float]:
    return {one["metric"]["concurrency"]: float(one["value"][1]) for one in there.query(expression, at)}


def test_last_week_is_found_at_the_same_concurrency(proof: Proof) -> None:
    panel = next(p for p in build.boards()["serving.json"].panels if p.kind == "bars")
    found = {query.legend: by_concurrency(proof.prometheus, fill(query.expr, LIVE)) for query in panel.queries}
    now, week = found["last hour"], found["7 days ago"]
    assert week == pytest.approx(dict.fromkeys(CONCURRENCY, 50.0), rel=0.01)
    assert now["1"] > now["5-8"] / 8


def test_ray_and_vllm_spellings_become_one(proof: Proof) -> None:
    query = proof.prometheus.query
    assert (
        query("vllm:num_requests_running") and query("vllm:num_requests_waiting") and query("vllm:kv_cache_usage_perc")
    )
    assert query('{__name__=~"ray_(vllm|glm).*|vllm_.*"}') == []
    assert query(f'glm_ttft_seconds_bucket{{job="{GPU}",le="2.0"}}')


def test_top_shows_the_service(proof: Proof) -> None:
    command = [GLM5, "top", "--url", proof.service.url, "--once", "--interval", "0.5"]
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    pool = json.loads(told.stdout)["pools"]["shared"]
    curve = {point["concurrency"]: point["recorded"] for point in pool["curve"]}
    assert pool["ready"] == 1
    assert curve["1"] > 0 and curve["5-8"] > 0
    assert "shared" in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def test_no_label_value_is_outside_the_closed_sets(proof: Proof) -> None:
    for name, label, allowed in (
        ("glm_output_tokens_by_concurrency_total", "concurrency", set(CONCURRENCY)),
        ("glm_requests_total", "tier", {"priority", "default", "flex", "none"}),
        ("glm_requests_total", "pool", {"shared", "none"}),
    ):
        assert set(by(proof.after, name, label)) <= allowed
