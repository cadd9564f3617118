"""Five mistakes that load testers make, each shown to be possible on the data at hand, and not made."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.plan import Level
from tests.fake_openai import FakeServer, Fault, Script
from tests.unit.loadtest.rig import run


def test_peak_is_never_below_the_mean(fake: FakeServer) -> None:
    """Counting chunks in whole-second buckets (vllm bench serve) puts the peak below the mean under drafts."""
    ran = run(fake, Script(itl_s=0.004, tokens_per_chunk=8), Level(0, 4, requests=16, timeout_s=30), output_tokens=128)
    m = ran.measured
    assert m.output_tok_s and m.peak_tok_s and ran.window
    times = np.concatenate([record.times for record in ran.outcome.records])
    naive_peak = np.bincount((times - times.min()).astype(int)).max()
    assert naive_peak < m.output_tok_s
    assert m.peak_tok_s >= m.output_tok_s


def test_first_token_stays_out_of_tpot(fake: FakeServer) -> None:
    ran = run(fake, Script(ttft_s=0.5, itl_s=0.02), Level(0, 2, requests=4, timeout_s=30), output_tokens=16)
    m = ran.measured
    assert m.tpot and m.e2el and m.ttft
    assert m.ttft.min > 0.49  # the wait that must not be in it
    assert m.tpot.mean == pytest.approx((m.e2el.mean - m.ttft.mean) / 15)


def test_errors_are_not_fast_requests(fake: FakeServer) -> None:
    """Every second request fails at once. Latency and goodput must not improve by it."""
    script = Script(ttft_s=0.2, itl_s=0.01, faults=(Fault("http_500", every=2),))
    level = Level(0, 4, requests=24, warmup=0, timeout_s=30)
    ran = run(fake, script, level, output_tokens=16, slo={"ttft": 10.0})
    m = ran.measured
    assert m.errors == {"http_500": sum(entry["fault"] == "http_500" for entry in ran.log)}
    assert m.failed == 12
    assert m.ok == 12
    assert m.e2el and m.ttft and m.goodput and m.request_s and ran.window
    assert m.e2el.n == 12
    assert m.e2el.min >= 0.34  # the script's least for a whole answer; a refusal comes at once
    assert m.ttft.n == 12
    assert m.ttft.min >= 0.19
    assert m.goodput.share == 0.5
    assert m.request_s * ran.window.seconds <= 12.001


def test_client_limited_run_is_marked_invalid(fake: FakeServer) -> None:
    """Answers that come as fast as the socket takes them: the client's parsing is the limit, and the report says so."""
    script = Script(events_per_write=500, log_writes=False)
    ran = run(fake, script, Level(0, 16, requests=48, timeout_s=60), output_tokens=8000)
    assert ran.summary.client is not None
    assert not ran.summary.valid
    # By its CPU share; or, where other work on the machine keeps it from the CPU, by its lateness.
    assert any(reason.startswith(("client saturated", "client late")) for reason in ran.summary.reasons), ran.summary
    # What is valid is shown on given loads (test_metrics.py) and, at a server's pace, by benchmarks/load_truth.py.


def test_chunk_is_not_a_token(fake: FakeServer) -> None:
    ran = run(
        fake,
        Script(itl_s=0.01, tokens_per_chunk=4),
        Level(0, 4, requests=12, ramp_s=0.6, timeout_s=30),
        output_tokens=64,
    )
    m = ran.measured
    chunks = sum(len(record.times) for record in ran.outcome.records)
    tokens = sum(record.output_tokens for record in ran.outcome.records)
    assert chunks * 4 == tokens == sum(entry["tokens"] for entry in ran.log)
    assert ran.window and m.itl and m.icl
    arrived = [t for record in ran.outcome.records if not record.warmup for t in record.times]
    inside = 4 * sum(ran.window.start <= t <= ran.window.end for t in arrived)
    assert m.output_tok_s == pytest.approx(inside / ran.window.seconds)
    assert m.icl.mean == pytest.approx(4 * m.itl.mean)
    assert m.itl.n == 4 * m.icl.n
    assert ran.summary.crosscheck is not None
    assert ran.summary.crosscheck.status == "agree"
