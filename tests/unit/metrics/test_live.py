"""The page's figures: folded from readings, equal to what was put in, bounded, and at a restart not negative."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from service.errors import EngineFailed, NotReady
from service.http.backend import PoolReadiness
from service.metrics.declared import Metrics
from service.metrics.exchange import merge, snapshot
from service.metrics.live import ERRORS, FAULTS, READINGS, LiveFigures, LiveReadiness, LiveReading, LiveWatch
from service.metrics.recorders import IngressRecorder
from service.metrics.top import Scrape
from tests.unit.metrics.read import Clock
from tests.unit.metrics.test_top import Busy

LOADED = LiveReadiness(1, 1, "ready", "", None, 0.0)
ROOT = Path(__file__).resolve().parents[3]


class Seen:
    """A service, and what the page shows of it at each look."""

    def __init__(self) -> None:
        self.busy, self.watch, self.wall = Busy(), LiveWatch(), 1e9

    def look(self, pools: dict[str, LiveReadiness] | None = None) -> LiveFigures:
        reading = LiveReading.of(self.busy.text().encode(), self.busy.clock.now)
        return self.watch.look(reading, self.wall + self.busy.clock.now, True, pools or {"shared": LOADED})

    def fail(self, error: Exception, stream: bool = True) -> None:
        with pytest.raises(type(error)), self.busy.ingress.request("chat", stream):
            raise error


def test_the_curve_is_what_was_served() -> None:
    seen = Seen()
    seen.busy.serve(1, 101, 0.01)  # 101 tokens in 1 s, before anybody looked
    seen.look()
    seen.busy.serve(1, 51, 0.02)
    seen.busy.serve(3, 11, 0.05)
    (pool,) = seen.look().pools
    one, three = pool.curve
    assert (one.concurrency, one.first, one.last) == ("1", 1, 1)
    assert (three.concurrency, three.first, three.last) == ("3-4", 3, 4)
    assert one.recorded == pytest.approx(152 / 2) and one.now == pytest.approx(51)
    assert three.recorded == three.now == pytest.approx(66)
    assert one.seconds == pytest.approx(2.0)


def test_the_plan_is_beside_it_before_anything_was_served() -> None:
    seen = Seen()
    seen.busy.replica.predicted_curve({1: 50.0, 2: 95.0, 4: 180.0})
    (pool,) = seen.look().pools
    assert [(p.concurrency, p.recorded, p.now, p.predicted) for p in pool.curve] == [
        ("1", None, None, 50.0),
        ("2", None, None, 95.0),
        ("3-4", None, None, 180.0),
    ]
    seen.busy.serve(1, 11, 0.1)
    one = seen.look().pools[0].curve[0]
    assert one.recorded is not None and one.predicted == 50.0


def test_rates_and_quantiles_are_of_their_spans() -> None:
    seen = Seen()
    seen.busy.serve(1, 11, 0.1)
    first = seen.look().pools[0]
    assert first.tokens_per_s == 0 and first.minute.requests == 0  # nothing happened since somebody looks
    assert first.total.requests == 1 and first.total.seconds is None
    (tier,) = first.total.tiers
    assert tier.output_tokens == 11 and tier.ttft_p95_s == pytest.approx(0.295, abs=0.006)
    assert first.minute.tiers[0].ttft_p95_s is None
    seen.busy.serve(2, 11, 0.1)
    seen.busy.clock.pass_(4)
    minute = seen.look().pools[0].minute
    assert minute.requests == 2 and minute.seconds == pytest.approx(5.3)
    assert minute.tiers[0].output_tokens == 22
    seen.busy.clock.pass_(55.8)
    seen.look()
    seen.busy.clock.pass_(4.9)
    late = seen.look().pools[0]
    assert late.minute.requests == 0 and late.tokens_per_s == 0  # a minute later it is out of the window
    assert late.total.requests == 3


def test_tokens_per_second_is_of_the_last_five() -> None:
    seen = Seen()
    for _ in range(12):
        seen.busy.serve(1, 6, 0.1)  # 0.3 s of prefill, 0.5 s of decoding
        seen.busy.clock.pass_(0.2)
        figures = seen.look()
    assert figures.pools[0].tokens_per_s == pytest.approx(6.0)


def test_shares_and_errors() -> None:
    seen = Seen()
    seen.look()
    for _ in range(3):
        seen.busy.serve(1, 5, 0.01)
    seen.fail(EngineFailed("x"))
    seen.fail(NotReady("y"))
    metrics = seen.busy.metrics
    metrics.requests.labels("chat", "shared", "default", "engine_failed").inc()
    metrics.prompt_tokens.labels("shared", "default").inc(200)
    metrics.cached_tokens.labels("shared", "default").inc(50)
    metrics.drafted_tokens.labels("shared").inc(30)
    metrics.accepted_tokens.labels("shared").inc(24)
    figures = seen.look()
    (pool,) = figures.pools
    assert pool.minute.error_ratio == pytest.approx(1 / 4)  # what got no pool is nobody's
    assert pool.minute.acceptance == pytest.approx(0.8)
    (tier,) = pool.minute.tiers
    prompts = Scrape.parse(seen.busy.text(), 0).sum("glm_prompt_tokens_total", tier="default")
    assert tier.cached_share == pytest.approx(50 / prompts)
    assert figures.errors == {"engine_failed": 2, "not_ready": 1}
    assert {(e.code, e.pool, e.count) for e in figures.last_errors} == {
        ("engine_failed", "", 1),
        ("engine_failed", "shared", 1),
        ("not_ready", "", 1),
    }
    assert {e.at for e in figures.last_errors} == {figures.at}
    assert seen.look().last_errors == figures.last_errors  # once each


def test_counters_that_began_anew_are_not_negative() -> None:
    seen = Seen()
    seen.busy.serve(1, 101, 0.01)
    seen.look()
    clock = seen.busy.clock
    seen.busy = Busy()
    seen.busy.clock.now = clock.now
    seen.busy.serve(1, 11, 0.1)
    (pool,) = seen.look().pools
    assert pool.tokens_per_s > 0 and pool.minute.requests == 1
    assert pool.curve[0].now == pytest.approx(11)


def test_it_is_bounded_and_small() -> None:
    seen = Seen()
    for _ in range(2 * READINGS):
        seen.fail(EngineFailed("x"))
        seen.busy.clock.pass_(0.1)
        figures = seen.look()
    assert len(figures.last_errors) == ERRORS
    assert len(seen.watch._readings) <= READINGS
    assert len(orjson.dumps(figures)) < 8000


def test_a_loading_pool_is_shown_before_it_has_any_metric() -> None:
    loading = LiveReadiness(0, 1, "weights", "part 3 of 11", 0.25, 90.0)
    seen = Seen()
    figures = seen.look({"latency": loading, "throughput": LOADED})
    assert [pool.pool for pool in figures.pools] == ["latency", "throughput"]
    assert figures.pools[0].readiness == loading and figures.pools[0].curve == ()


def test_the_reader_agrees_with_the_general_parser() -> None:
    busy = Busy()
    busy.serve(5, 7, 0.03)
    text = busy.text()
    ours, general = LiveReading.of(text.encode(), 0.0), Scrape.parse(text, 0.0)
    assert len(ours.families) >= 15
    for name, children in ours.families.items():
        assert sum(children.values()) == pytest.approx(general.sum(name)), name
    wanted: dict[str, Any] = {"pool": "shared", "tier": "default", "le": "0.3"}
    name = "glm_ttft_seconds_bucket"
    assert ours.sum(name, **wanted) == general.sum(name, **wanted) > 0


def test_what_it_wants_is_declared() -> None:
    """A metric that is renamed may not silently read as zero here."""
    from service.metrics.live import _WANTED

    metrics = Metrics()
    IngressRecorder(metrics, Clock())
    names = {line.split()[2] for line in merge([snapshot(metrics)]).decode().splitlines() if line.startswith("# TYPE")}
    assert {re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name) for name in _WANTED} <= names


def test_faults_are_those_of_the_alert() -> None:
    rules = (ROOT / "dashboards/alerts.yml").read_text()
    alert = rules[rules.index("GlmErrorRatio") :]
    found = re.search(r'outcome=~"([^"]+)"', alert)
    assert found and set(found[1].split("|")) == FAULTS


def test_readiness_has_the_same_fields_here() -> None:
    assert LiveReadiness.__dataclass_fields__.keys() == PoolReadiness.__dataclass_fields__.keys()
