"""The fleet in virtual time: replicas against a step-by-step reference, books that balance, speed, scaling."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from service.errors import UserError
from service.planning import workload
from service.planning.cli import simulate_app
from service.planning.fleet import Fleet, PoolSpec
from service.planning.fleet_report import quantiles, report
from service.planning.replica import Replica
from service.planning.simulate import FleetWish, simulate
from service.planning.step_model import step_model
from service.planning.workload import Arrival


@dataclass(frozen=True)
class Steps:
    """Step time grows with the batch; a prompt costs a millisecond a token."""

    first: float = 0.02
    more: float = 0.001
    per_context: float = 0.0

    def decode_step_s(self, running: int, context_tokens: int) -> float:
        return self.first + self.more * (running - 1) + self.per_context * context_tokens

    def prefill_s(self, tokens: int) -> float:
        return tokens * 1e-3


def stepwise(steps: Steps, arrivals: list[Arrival], slots: int) -> dict[int, float]:
    """Every step simulated one by one, as the engine does: who waits enters at a step's border, its prompt is part of
    that step. End time by index."""
    now, running, waiting, ends = 0.0, {}, list(range(len(arrivals))), {}
    while waiting or running:
        if not running and waiting:
            now = max(now, arrivals[waiting[0]].arrived)
        step = 0.0
        while waiting and arrivals[waiting[0]].arrived <= now and len(running) < slots:
            i = waiting.pop(0)
            running[i] = 0
            step += steps.prefill_s(arrivals[i].prompt)
        context = sum(arrivals[i].prompt + done for i, done in running.items())
        now += step + steps.decode_step_s(len(running), context)
        for i in list(running):
            running[i] += 1
            if running[i] >= arrivals[i].output:
                ends[i] = now
                del running[i]
    return ends


def test_one_request_by_hand():
    replica = Replica(Steps(), slots=4)
    first = replica.join(1.0, 7, prompt=100, output=50)
    assert first == pytest.approx(1.0 + 0.1 + 0.02)
    assert replica.next_end() == pytest.approx(1.0 + 0.1 + 50 * 0.02)
    assert replica.end(2.1) == 7
    assert replica.running == 0
    assert replica.busy_s == pytest.approx(1.1)


def test_two_requests_by_hand():
    replica = Replica(Steps(), slots=4)
    replica.join(0.0, 1, prompt=0, output=100)
    replica.join(1.0, 2, prompt=0, output=10)  # the first has 50 tokens by now; steps take 21 ms from here
    assert replica.next_end() == pytest.approx(1.0 + 10 * 0.021)
    assert replica.end(1.21) == 2
    assert replica.next_end() == pytest.approx(1.21 + 40 * 0.02)


ARRIVALS = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 200), st.integers(20, 200)), min_size=1, max_size=12).map(
    lambda rows: [Arrival(*row) for row in sorted(rows)]
)


@given(ARRIVALS)
@settings(max_examples=60, deadline=None)
def test_against_every_step_simulated(arrivals: list[Arrival]):
    """Ends agree with the step-by-step reference within 3 % and two steps for each arrival: there a join waits for the
    step in progress, and others decode once more while it does."""
    steps = Steps(per_context=1e-6)
    exact = stepwise(steps, arrivals, slots=16)
    run = Fleet([PoolSpec("shared", 1, 16, steps)]).run(arrivals)
    for i, served in enumerate(run.served):
        assert served.ended is not None
        taken = exact[i] - arrivals[i].arrived
        assert served.ended - arrivals[i].arrived == pytest.approx(taken, rel=0.03, abs=2 * len(arrivals) * 0.035)


@given(ARRIVALS, st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_books_balance_whatever_comes(arrivals: list[Arrival], boxes: int, slots: int, queue: int):
    run = Fleet([PoolSpec("shared", boxes, slots, Steps(), queue_requests=queue)], timeout_s=2.0).run(arrivals)
    assert len(run.served) == len(arrivals)
    assert "unfinished" not in {s.outcome for s in run.served}
    for served in run.served:
        if served.outcome == "ok":
            assert served.arrival.arrived <= (served.started or 0) <= (served.first_token or 0) <= (served.ended or 0)
    # never more at once than slots
    edges = sorted(
        [(s.started, 1) for s in run.served if s.started is not None]
        + [(s.ended, -1) for s in run.served if s.ended is not None]
    )
    level = most = 0
    for _, change in edges:
        level += change
        most = max(most, level)
    assert most <= boxes * slots
    assert run.busy_s["shared"] <= run.box_seconds["shared"] + 1e-6


def test_priority_goes_to_the_latency_pool_and_spills_when_it_is_full():
    pools = [PoolSpec("latency", 1, 1, Steps()), PoolSpec("throughput", 1, 8, Steps())]
    arrivals = [Arrival(0.0, 10, 100, "priority"), Arrival(0.1, 10, 100, "priority"), Arrival(0.2, 10, 100, "flex")]
    run = Fleet(pools).run(arrivals)
    assert [(s.pool, s.reason) for s in run.served] == [
        ("latency", "tier"),
        ("throughput", "spill"),
        ("throughput", "tier"),
    ]


def test_reserved_slots_and_order_of_waiting_are_the_services():
    pool = PoolSpec("shared", 1, 2, Steps(), reserved_slots=1)
    arrivals = [Arrival(0.0, 0, 100, "flex"), Arrival(0.1, 0, 100, "flex"), Arrival(0.2, 0, 100, "default")]
    arrivals.append(Arrival(0.3, 0, 100, "priority"))
    run = Fleet([pool]).run(arrivals)
    waited = [s.waited for s in run.served]
    assert waited[0] == waited[3] == 0.0  # the reserved slot is free for priority
    assert waited[2] is not None
    assert waited[1] is not None
    assert waited[2] < waited[1]  # default before flex


def test_full_queues_refuse_and_deadlines_hold():
    pool = PoolSpec("shared", 1, 1, Steps(), queue_requests=1)
    arrivals = [Arrival(0.0, 0, 500, "default"), Arrival(0.1, 0, 10, "default"), Arrival(0.2, 0, 10, "default")]
    run = Fleet([pool], timeout_s=3.0).run(arrivals)
    assert [s.outcome for s in run.served] == ["ok", "deadline_exceeded", "overloaded"]


def test_the_same_seed_gives_the_same_run():
    trace = workload.read("poisson:20:60", seed=3)
    runs = [simulate(trace, wish(boxes=4)).served for _ in range(2)]
    assert runs[0] == runs[1]
    assert simulate(workload.read("poisson:20:60", seed=4), wish(boxes=4)).served != runs[0]


def wish(**changes: object) -> FleetWish:
    base: dict[str, object] = {
        "boxes": 4, "latency_boxes": 0, "model": "glm-5", "hardware": "8x-rtx-pro-6000", "mtp": False, "scale": False,
        "load_s": 60.0, "timeout_s": 600.0, "seed": 1,
    }  # fmt: skip
    return FleetWish(**(base | changes))  # type: ignore[arg-type]


def test_a_full_box_makes_what_the_step_model_says():
    """64 users, each with the next request ready: tok/s of the fleet is the model's, prefill taken off."""
    model = step_model("glm-5", "8x-rtx-pro-6000", slots=64)
    arrivals = [Arrival(0.0, 200, 500) for _ in range(64 * 4)]
    run = Fleet([PoolSpec("shared", 1, 64, model)]).run(arrivals)
    steps = 4 * sum(model.decode_step_s(64, 64 * (200 + i)) for i in range(500))
    measured = sum(s.arrival.output for s in run.served) / run.seconds
    assert measured == pytest.approx(64 * 4 * 500 / (steps + 64 * 4 * model.prefill_s(200)), rel=0.03)


def test_scaling_starts_boxes_under_load_and_gives_them_back():
    busy = [Arrival(i * 0.01, 200, 300, "default") for i in range(30_000)]  # 100 a second for 300 s
    quiet = [Arrival(300.0 + i * 4, 50, 20, "default") for i in range(400)]  # then hardly anything for 1600 s
    run = simulate([*busy, *quiet], wish(boxes=32, scale=True, load_s=30.0))
    sizes = [count for _, _, count in run.boxes]
    assert max(sizes) > sizes[0]
    assert sizes[-1] < max(sizes)
    assert max(sizes) <= 32
    assert Counter(s.outcome for s in run.served)["unfinished"] == 0


def test_over_100_000_requests_a_minute_on_256_boxes():
    trace = workload.read("poisson:400:60", seed=1)
    began = time.process_time()
    run = simulate(trace, wish(boxes=256, latency_boxes=64))
    assert len(trace) / (time.process_time() - began) * 60 > 100_000
    assert all(s.outcome == "ok" for s in run.served)


# -- traces


def test_csv_and_azure_traces(tmp_path: Path):
    ours = tmp_path / "ours.csv"
    ours.write_text("arrived_s,prompt_tokens,output_tokens,tier,mode\n5,10,20,flex,\n3,1,2,auto,latency\n")
    assert workload.read(str(ours)) == [Arrival(0.0, 1, 2, None, "latency"), Arrival(2.0, 10, 20, "flex", None)]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    found = workload.read(str(azure))
    assert found[0] == Arrival(0.0, 374, 44)
    assert found[1].arrived == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a,b\n1,2\n", "no column for"),
        ("arrived_s,prompt_tokens,output_tokens\n", "holds no requests"),
        ("arrived_s,prompt_tokens,output_tokens\n1,2,0\n", "line 2"),
        ("arrived_s,prompt_tokens,output_tokens\nnan,2,1\n", "line 2"),
        ("arrived_s,prompt_tokens,output_tokens,tier\n1,2,3,gold\n", "gold"),
    ],
)
def test_bad_traces_are_refused_by_line(tmp_path: Path, text: str, word: str):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=word):
        workload.read(str(path))


def test_poisson_has_the_rate_and_the_means():
    found = workload.read("poisson:100:200:1000:250:0.2", seed=5)
    assert len(found) == pytest.approx(20_000, rel=0.03)
    assert sum(a.prompt for a in found) / len(found) == pytest.approx(1000, rel=0.05)
    assert sum(a.output for a in found) / len(found) == pytest.approx(250, rel=0.05)
    assert sum(a.tier == "priority" for a in found) / len(found) == pytest.approx(0.2, abs=0.02)
    for bad in ("poisson:x:1", "poisson:1", "poisson:0:10"):
        with pytest.raises(UserError):
            workload.read(bad)


def test_quantiles_are_nearest_rank():
    assert quantiles([None, *map(float, range(100))]) == {0.5: 50.0, 0.95: 95.0, 0.99: 99.0}
    assert quantiles([None]) is None


def test_the_command(tmp_path: Path):
    result = CliRunner().invoke(simulate_app, ["poisson:5:30", "--boxes", "2", "--json"])
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)
    assert tree["outcomes"] == {"ok": tree["requests"]}
    assert tree["tiers"][0]["ttft_s"]["p50"] > 0
    overloaded = CliRunner().invoke(simulate_app, ["poisson:200:20:4000:500", "--boxes", "1", "--timeout", "1"])
    assert overloaded.exit_code == 1
    for bad in (["none.csv"], ["poisson:1:5", "--boxes", "2", "--latency-boxes", "3"]):
        assert isinstance(CliRunner().invoke(simulate_app, bad).exception, UserError)


def test_a_report_adds_up():
    run = simulate(workload.read("poisson:20:30"), wish(boxes=4, latency_boxes=1))
    found = report(run)
    assert sum(found.outcomes.values()) == found.requests == sum(t.requests for t in found.tiers)
    assert sum(p.output_tokens for p in found.pools) == sum(s.arrival.output for s in run.served)
    assert found.box_hours == pytest.approx(4 * run.seconds / 3600)
