"""The fleet in virtual time: against hand-computed truth, and the three ways of sharing boxes against each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from service.scaling.replay import Fleet, Outcome, Plan, Targets, Trace, bursts, oracle, policy, run, static


@dataclass(frozen=True)
class Knobs:
    budget: float | None
    priority_wait_s: float = 1.0
    batch_wait_s: float = 60.0
    down_after_s: float = 60.0
    start_s: float = 60.0


SMALL = Fleet(2, latency_slots=1, prefill_s=1.0, step_s=0.1, batch_tokens_per_s=10.0, batch_drain_s=5.0, start_s=20.0)


def test_one_slot_by_hand() -> None:
    # Each request holds the slot 1 + 10 * 0.1 = 2 s. They come at 0, 1 and 9: waits 0, 1, 0.
    trace = Trace(60.0, [(0.0, 10), (1.0, 10), (9.0, 10)], [(0.0, 300.0)])
    plan, first = static(1, 2)
    outcome = run(trace, SMALL, plan, first)
    assert list(outcome.ttft_s) == [1.0, 2.0, 1.0]
    assert outcome.batch_tokens == 300.0 and outcome.moves == 0 and outcome.unserved == 0


def test_a_move_costs_drain_and_start() -> None:
    """A box moved at second 10 stops making tokens at 15 (drain) and serves its first request at 35 (start)."""
    trace = Trace(60.0, [(0.0, 400), (1.0, 10)], [(0.0, 10_000.0)])

    def plan(now: float, readings: object) -> Targets:
        return {"latency": 2 if now >= 10 else 1, "throughput": 0 if now >= 10 else 1}

    outcome = run(trace, SMALL, plan, {"latency": 1, "throughput": 1})
    assert outcome.batch_tokens == pytest.approx(150.0, abs=10.0)
    assert outcome.ttft_s[1] == pytest.approx(35.0 - 1.0 + 1.0, abs=1.0)
    assert outcome.moves == 1


def compare(boxes: int, seconds: float, start_s: float) -> dict[str, Outcome]:
    fleet = Fleet(boxes, start_s=start_s, batch_drain_s=start_s / 10, throughput_floor=0 if boxes == 2 else 1)
    trace = bursts(fleet, seconds=seconds)
    knobs = Knobs(boxes, down_after_s=start_s, start_s=start_s)
    plans: dict[str, tuple[Plan, Targets]] = {
        "static": static(boxes // 2, boxes),
        "policy": policy(fleet, knobs, {"latency": 1, "throughput": boxes - 1}),
        "oracle": oracle(trace, fleet),
    }
    return {name: run(trace, fleet, plan, first) for name, (plan, first) in plans.items()}


@pytest.mark.parametrize(("boxes", "seconds"), [(2, 28_800.0), (16, 14_400.0), (256, 1800.0)])
def test_the_policy_beats_a_static_split(boxes: int, seconds: float) -> None:
    began = time.perf_counter()
    found = compare(boxes, seconds, start_s=60.0 * seconds / 86_400.0)
    took = time.perf_counter() - began
    for name, outcome in found.items():
        print(
            f"\n{boxes} boxes, {name}: p95 TTFT {outcome.ttft_quantile(0.95):.1f} s, "
            f"batch {outcome.batch_tokens_per_s:.0f} tok/s, {outcome.moves} moves ({took:.1f} s for all)",
            end="",
        )
    fixed, ours, best = found["static"], found["policy"], found["oracle"]
    assert 3 * ours.ttft_quantile(0.95) < fixed.ttft_quantile(0.95)
    # With two boxes a burst takes both: batch pays for priority. From 16 on there is no need to choose.
    assert ours.batch_tokens_per_s >= (0.6 if boxes == 2 else 1.0) * fixed.batch_tokens_per_s
    assert best.ttft_quantile(0.95) <= ours.ttft_quantile(0.95), "an oracle that loses to a policy is none"


def test_same_seed_same_trace() -> None:
    fleet = Fleet(4)
    assert bursts(fleet, seconds=3600) == bursts(fleet, seconds=3600)
    assert bursts(fleet, seconds=3600) != bursts(fleet, seconds=3600, seed=2)
    assert replace(fleet, boxes=5) != fleet
