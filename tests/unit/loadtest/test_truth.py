"""Every metric against what the server really did, at C = 1, 10, 64 and 256.

Nothing here depends on how fast the machine is: counts are exact, the metrics are worked out again from the same
records, and of the two clocks only what cause and effect promise is asked (no token is seen before it is written). How
near the two clocks are is measured by benchmarks/load_truth.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loadtest.metrics import Spread
from loadtest.plan import Level
from tests.fake_openai import FakeServer, Script
from tests.unit.loadtest.rig import Ran, run

TTFT, STEP, ITL, OUT = 0.20, 0.02, 0.02, 16
SCRIPT = Script(ttft_s=TTFT, ttft_step_s=STEP, itl_s=ITL)
CYCLE = TTFT + 4.5 * STEP + (OUT - 1) * ITL  # request numbers mod 10 give 0..9 steps, 4.5 on average
TICK_S = 0.002
"""A timer of the event loop may be early by its rounding."""


@pytest.mark.parametrize("concurrency", [1, 10, 64, 256])
def test_each_metric_is_what_the_records_say_and_the_server_logged(fake: FakeServer, concurrency: int) -> None:
    rounds = {1: 10, 10: 8}.get(concurrency, 4)
    level = Level(0, concurrency, requests=rounds * concurrency, ramp_s=CYCLE, timeout_s=120)
    ran = run(fake, SCRIPT, level, output_tokens=OUT, slo={"ttft": TTFT + 4.5 * STEP, "e2el": 60.0})
    assert ran.measured.failed == 0
    assert ran.measured.sent == rounds * concurrency
    assert ran.summary.crosscheck is not None
    assert ran.summary.crosscheck.status == "agree"
    assert ran.summary.client is not None
    assert ran.summary.client.shards == (2 if concurrency >= 128 else 1)
    cause_before_effect(ran)
    metrics_of_the_records(ran)


def cause_before_effect(ran: Ran) -> None:
    """Sent before it arrived, written before it was seen; as many as the server counted.

    Where that holds of each pair it holds of both sides sorted, so nothing need know which request is which.
    """
    records, log = ran.outcome.records, ran.log
    assert len(records) == len(log)
    sent, arrived = sorted(r.sent for r in records), sorted(entry["arrived"] for entry in log)
    assert all(a <= b for a, b in zip(sent, arrived, strict=True))
    seen = sorted(t for record in records for t in record.times)
    written = sorted(t for entry in log for t, _ in entry["writes"])
    assert all(a <= b for a, b in zip(written, seen, strict=True))
    assert sum(r.output_tokens for r in records) == sum(entry["tokens"] for entry in log) == OUT * len(log)
    # The script's times are the least that anybody can see.
    least = sorted(TTFT + entry["number"] % 10 * STEP - TICK_S for entry in log)
    assert all(a <= b for a, b in zip(least, sorted(r.ttft for r in records), strict=True))
    assert min(r.e2el - r.ttft for r in records) > 0
    assert all(list(r.times) == sorted(r.times) and r.sent <= r.times[0] and r.times[-1] <= r.end for r in records)


def metrics_of_the_records(ran: Ran) -> None:
    """Worked out once more, one request at a time, by code that shares nothing with loadtest/metrics.py."""
    m, window = ran.measured, ran.window
    records = [r for r in ran.outcome.records if not r.warmup]
    assert m.goodput and window is not None
    ttft = [r.times[0] - r.sent for r in records]
    e2el = [r.times[-1] - r.sent for r in records]
    tpot = [(r.times[-1] - r.times[0]) / (OUT - 1) for r in records]
    gaps = [b - a for r in records for a, b in zip(r.times[:-1], r.times[1:], strict=True)]
    for got, values in (
        *((m.ttft, ttft), (m.ttfa, ttft), (m.e2el, e2el), (m.tpot, tpot), (m.itl, gaps), (m.icl, gaps)),
        (m.per_user_tok_s, [1 / t for t in tpot]),
    ):
        same(got, values)
    inside = sum(window.start <= t <= window.end for r in records for t in r.times)
    assert m.output_tok_s == pytest.approx(inside / window.seconds)
    lives = [(min(r.end, window.end) - max(r.sent, window.start)) / (r.end - r.sent) for r in records]
    assert m.request_s == pytest.approx(sum(min(max(life, 0), 1) for life in lives) / window.seconds)
    assert m.goodput.share == pytest.approx(sum(t <= TTFT + 4.5 * STEP for t in ttft) / len(records))


def same(got: Spread | None, values: Sequence[float]) -> None:
    assert got is not None
    assert (got.n, got.mean, got.min, got.max) == (
        len(values),
        pytest.approx(np.mean(values)),
        min(values),
        max(values),
    )
    assert (got.p50, got.p95) == (pytest.approx(np.median(values)), pytest.approx(np.percentile(values, 95)))


def test_a_token_has_the_time_when_it_came_not_when_the_answer_ended(fake: FakeServer) -> None:
    """Tokens far apart: each is noted before the next one is written. Only a stall of 1.5 s could blur that."""
    ran = run(fake, Script(itl_s=1.5), Level(0, 1, requests=2, warmup=0, timeout_s=60), output_tokens=3)
    assert ran.measured.failed == 0
    records = sorted(ran.outcome.records, key=lambda r: r.sent)
    for record, entry in zip(records, sorted(ran.log, key=lambda e: e["arrived"]), strict=True):
        written = [t for t, _ in entry["writes"]]
        for at, seen in enumerate(record.times):
            assert written[at] <= seen
            assert at + 1 == len(written) or seen < written[at + 1]


def test_open_loop_counts_from_the_scheduled_send(fake: FakeServer) -> None:
    """20 requests/s at a server that can do 10: the waiting must show."""
    script = Script(ttft_s=0.1, itl_s=0.0, slots=1)
    ran = run(fake, script, Level(0, 0, rate=20.0, requests=30, warmup=1, timeout_s=60), output_tokens=2)
    m = ran.measured
    assert m.failed == 0
    assert m.ttft is not None
    # A queue that grows by one request every 0.1 s: the 30th waits for about half of the 3 s of work before it.
    assert m.ttft.max > 1.0
    records = [r for r in ran.outcome.records if not r.warmup]
    assert all(r.sent >= r.scheduled for r in records)
    spans = np.diff(sorted(r.scheduled for r in records))
    assert spans.std() > 0.3 * spans.mean()  # Poisson, not a metronome
    assert any("waiting grew" in note for note in ran.summary.notes)


def test_reasoning_is_a_token_but_not_an_answer(fake: FakeServer) -> None:
    script = Script(ttft_s=0.1, itl_s=0.02, reasoning_tokens=10)
    ran = run(fake, script, Level(0, 2, requests=6, timeout_s=30), output_tokens=20)
    m = ran.measured
    records = [r for r in ran.outcome.records if not r.warmup]
    same(m.ttft, [r.times[0] - r.sent for r in records])
    same(m.ttfa, [r.times[10] - r.sent for r in records])  # the eleventh token is the answer's first
    assert m.output_tokens == 20


def test_duration_ends_the_level(fake: FakeServer) -> None:
    """Nothing is sent after it, and what was sent is answered."""
    level = Level(0, 4, duration_s=1.0, timeout_s=60)
    ran = run(fake, Script(ttft_s=0.02, itl_s=0.005), level, output_tokens=8)
    assert ran.measured.failed == 0
    measured = [r for r in ran.outcome.records if not r.warmup]
    assert max(r.sent for r in measured) - min(r.sent for r in measured) <= 1.0
    assert all(len(r.times) == 8 for r in measured)
