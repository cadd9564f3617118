"""Every metric against what the server really did, at C = 1, 10, 64 and 256."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.plan import Level
from tests.fake_openai import FakeServer, Script
from tests.unit.loadtest.rig import Ran, close, quiet_machine, run

TTFT, STEP, ITL, OUT = 0.20, 0.02, 0.02, 16
SCRIPT = Script(ttft_s=TTFT, ttft_step_s=STEP, itl_s=ITL)
CYCLE = TTFT + 4.5 * STEP + (OUT - 1) * ITL  # request numbers mod 10 give 0..9 steps, 4.5 on average


@pytest.mark.parametrize("concurrency", [1, 10, 64, 256])
def test_each_metric_within_two_percent_of_the_truth(fake: FakeServer, concurrency: int) -> None:
    with quiet_machine(fake):
        _check_level(fake, concurrency)


def _check_level(fake: FakeServer, concurrency: int) -> None:
    rounds = {1: 10, 10: 8}.get(concurrency, 4)  # few streams need more rounds for the edges not to count
    level = Level(0, concurrency, requests=rounds * concurrency, ramp_s=CYCLE, timeout_s=30)
    ran = run(fake, SCRIPT, level, output_tokens=OUT, slo={"ttft": TTFT + 4.5 * STEP, "e2el": 60.0})
    m = ran.measured
    assert m.failed == 0
    assert ran.summary.crosscheck is not None
    assert ran.summary.crosscheck.status == "agree"
    assert ran.summary.client is not None
    assert ran.summary.client.shards == (2 if concurrency >= 128 else 1)

    # The server's own log: its writes on the same clock, counted by code that shares nothing with the client's.
    first, last, gaps = _of_measured(ran)
    arrived = np.array([entry["arrived"] for entry in _measured_entries(ran)])
    truth = {
        "ttft": first - arrived,
        "e2el": last - arrived,
        "tpot": (last - first) / (OUT - 1),
    }
    assert m.ttft and m.e2el and m.tpot and m.itl and m.icl and m.ttfa and m.per_user_tok_s and m.goodput
    for name, values in truth.items():
        got = getattr(m, name)
        assert close(got.mean, float(values.mean())), name
        assert close(got.p50, float(np.median(values))), name
        assert close(got.p95, float(np.percentile(values, 95))), name
    assert close(m.ttfa.mean, float(truth["ttft"].mean()))
    assert close(m.itl.mean, float(gaps.mean()))
    assert close(m.icl.mean, float(gaps.mean()))
    assert close(m.per_user_tok_s.p50, float(np.median(1 / truth["tpot"])))
    assert ran.window is not None
    written = np.array([t for entry in ran.log for t, _ in entry["writes"]])
    inside = int(((written >= ran.window.start) & (written <= ran.window.end)).sum())
    assert close(m.output_tok_s, inside / ran.window.seconds)

    # And the script itself.
    assert close(m.output_tok_s, concurrency * OUT / CYCLE)
    assert close(m.request_s, concurrency / CYCLE)
    assert close(m.ttft.mean, TTFT + 4.5 * STEP)
    assert close(m.itl.mean, ITL)
    assert close(m.tpot.mean, ITL)
    assert close(m.e2el.mean, CYCLE)
    assert 0.35 <= m.goodput.share <= 0.65  # half of the steps lie below the limit


def _measured_entries(ran: Ran) -> list[dict]:
    """Log entries of the measured requests: both lists in the order of sending."""
    records = sorted(ran.outcome.records, key=lambda r: r.sent)
    entries = sorted(ran.log, key=lambda e: e["arrived"])
    assert len(records) == len(entries)
    return [entry for record, entry in zip(records, entries, strict=True) if not record.warmup]


def _of_measured(ran: Ran) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first write, last write, all gaps) of the measured requests."""
    writes = [np.array([t for t, _ in entry["writes"]]) for entry in _measured_entries(ran)]
    return (
        np.array([w[0] for w in writes]),
        np.array([w[-1] for w in writes]),
        np.concatenate([np.diff(w) for w in writes]),
    )


def test_open_loop_counts_from_the_scheduled_send(fake: FakeServer) -> None:
    """20 requests/s at a server that can do 10: the waiting must show."""
    script = Script(ttft_s=0.1, itl_s=0.0, slots=1)
    ran = run(fake, script, Level(0, 0, rate=20.0, requests=30, warmup=1, timeout_s=30), output_tokens=2)
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
    with quiet_machine(fake):
        ran = run(fake, script, Level(0, 2, requests=6, timeout_s=30), output_tokens=20)
        m = ran.measured
        assert m.ttft and m.ttfa
        assert close(m.ttft.p50, 0.1, 0.04)
        assert close(m.ttfa.p50, 0.1 + 10 * 0.02, 0.04)
    assert m.output_tokens == 20


def test_duration_ends_the_level(fake: FakeServer) -> None:
    ran = run(fake, Script(ttft_s=0.02, itl_s=0.005), Level(0, 4, duration_s=1.0, timeout_s=30), output_tokens=8)
    assert ran.window is not None
    assert 0.9 < ran.window.seconds < 2
    assert ran.measured.failed == 0
