"""Conversion with the real step model: each mode with its own settings, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.conversion import Conversion, wanted
from service.config import PROFILES, Config, load, parse
from service.fleet.post import Demand, Post
from service.metrics.declared import Metrics
from service.scaling.conversion import Verdict

BOX = "8x-rtx-pro-6000"
LATENCY: dict[str, Any] = {"mode": "interactivity", "mtp_tokens": 3}
THROUGHPUT: dict[str, Any] = {"mode": "throughput", "mtp_tokens": 0}
RELOAD_S = 300.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def profile(slots: int = 256, **scaling: Any) -> Config:
    """A latency replica of GLM-5 whose other mode is throughput."""
    engine = {"name": "vllm", "tensor_parallel": 8, **LATENCY}
    shared = {"engine": engine, "slots": 4, "other_mode": {"slots": slots, "engine": THROUGHPUT}}
    return parse(
        {
            "model": {"path": "glm-5", "context_tokens": 8192},
            "pools": {"shared": shared},
            "scaling": {"convert": "on", "hardware": BOX, **scaling},
        }
    )


def watch(conversion: Conversion, clock: Clock, requests: int, seconds: float) -> Verdict | None:
    """The first verdict to convert while so many requests want the replica, looked at twice a minute."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 30.0
        verdict = conversion.observe(requests, 0)
        if verdict is not None:
            return verdict
    return None


@pytest.mark.parametrize("slots", [64, 256])
def test_each_mode_has_its_own_settings(slots: int) -> None:
    """One user is 1.7 times as fast with drafts; many want many slots. Needed is 1.15 either way."""
    conversion = Conversion(profile(slots), Metrics(), RELOAD_S)
    assert conversion.rate("latency", 1) == pytest.approx(127, rel=0.01)
    assert conversion.rate("throughput", 1) == pytest.approx(73, rel=0.01)
    assert conversion.rate("latency", 4) > 1.15 * conversion.rate("throughput", 4)
    assert conversion.rate("throughput", 16) > 1.15 * conversion.rate("latency", 16)
    assert conversion.rate("throughput", 64) > 3 * conversion.rate("latency", 64)
    full = conversion.rate("throughput", slots)
    assert conversion.rate("throughput", 1000) == full > conversion.rate("throughput", slots - 8)


@pytest.mark.parametrize("slots", [64, 256])
def test_there_and_back(slots: int) -> None:
    """A day with the real model: one user, then many, then one again. Each change pays, and nothing else happens."""
    clock, config = Clock(), profile(slots)
    conversion, pool = Conversion(config, Metrics(), RELOAD_S, clock), config.pools["shared"]
    assert watch(conversion, clock, 1, 4 * 3600) is None, "one user has the right mode"
    for requests, mode in ((200, "throughput"), (1, "latency"), (200, "throughput")):
        verdict = watch(conversion, clock, requests, 4 * 3600)
        assert verdict is not None and (verdict.mode, verdict.why) == (mode, "gain_pays")
        pool = pool.converted()
        assert pool.slots == (4 if mode == "latency" else slots)
        conversion.done(pool, verdict, RELOAD_S)
        assert watch(conversion, clock, requests, 4 * 3600) is None, "the same demand wants the same mode"


def test_a_reload_is_not_forgotten_at_once() -> None:
    """At least ten reload times between two: 3000 s."""
    clock, config = Clock(), profile()
    conversion, began = Conversion(config, Metrics(), RELOAD_S, clock), clock.now
    assert watch(conversion, clock, 200, 4 * 3600) is not None
    assert 3000 <= clock.now - began <= 3060


def test_the_first_gap_between_priority_requests_is_taken() -> None:
    """One user without a tier is priority while slots are free: a change in his favour must not wait a minute more."""
    clock, config = Clock(), profile()
    pool = config.pools["shared"].converted()
    conversion = Conversion(config.model_copy(update={"pools": {"shared": pool}}), Metrics(), RELOAD_S, clock)
    for _ in range(2 * 3000):  # the first look after ten reload times falls on the last of these
        clock.now += 0.5
        assert conversion.observe(1, 1) is None, "a priority request runs"
    clock.now += 0.5
    verdict = conversion.observe(1, 0)
    assert verdict is not None and (verdict.mode, verdict.why) == ("latency", "gain_pays")


def test_a_dry_run_without_other_mode_knows_the_usual_settings() -> None:
    """The shipped box (56 slots, drafts): many users want 256 slots without drafts. A batch replica with one user wants
    four slots with drafts."""
    dry = [f"scaling={{convert: dry_run, hardware: {BOX}}}", "model.path=glm-5"]
    shipped = Conversion(load(PROFILES / "one-box-8gpu.yaml", dry), Metrics(), RELOAD_S)
    assert shipped.rate("throughput", 1) == pytest.approx(73, rel=0.01)
    assert shipped.rate("throughput", 256) > 1.15 * shipped.rate("latency", 256)
    engine = "pools.shared.engine"
    batch = [*dry, f"{engine}.mtp_tokens=0", f"{engine}.mtp_schedule=[]", "pools.shared.slots=256"]
    many = Conversion(load(PROFILES / "one-box-8gpu.yaml", batch), Metrics(), RELOAD_S)
    assert many.rate("latency", 1) > 1.5 * many.rate("throughput", 1)


def test_the_simulated_engine_converts_by_its_own_settings() -> None:
    engine = {"name": "simulated", "mtp": True}
    shared = {"engine": engine, "slots": 2, "other_mode": {"slots": 64, "engine": {"mtp": False}}}
    config = parse({"pools": {"shared": shared}, "scaling": {"convert": "on", "hardware": BOX}})
    conversion = Conversion(config, Metrics(), RELOAD_S)
    assert conversion.rate("latency", 1) > 1.5 * conversion.rate("throughput", 1)
    assert conversion.rate("throughput", 40) > 3 * conversion.rate("latency", 40)


def test_what_wants_the_replica_runs_or_waits_at_any_ingress() -> None:
    posts = [
        Post("a", "ingress", demand={"shared": Demand(running=5, waiting=20)}),
        Post("b", "ingress", demand={"shared": Demand(running=4, waiting=2)}),
        Post("c", "ingress"),
        Post("r", "replica", "shared"),
    ]
    assert wanted(posts, replicas=1) == 31
    assert wanted(posts, replicas=2) == 16, "its part, rounded up"
    assert wanted(posts, replicas=0) == 31
