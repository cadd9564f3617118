"""Errors are data: each kind found, named and counted, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest

from loadtest.plan import Level
from loadtest.records import CANCELLED
from loadtest.wire import Target
from tests.fake_openai import FAULTS, FakeServer, Fault, Script
from tests.unit.loadtest.rig import Silent, run

NAMED = {"hang": "timeout"} | {name: name for name in FAULTS if name != "hang"}


def test_every_fault_is_found_and_classified(fake: FakeServer) -> None:
    faults = tuple(Fault(kind, every=20, first=2 * i) for i, kind in enumerate(FAULTS))
    script = Script(ttft_s=0.01, itl_s=0.001, faults=faults)
    level = Level(0, 8, requests=80, warmup=0, timeout_s=1.5)
    ran = run(fake, script, level, output_tokens=12)
    truth = Counter(NAMED[entry["fault"]] for entry in ran.log if entry["fault"])
    assert set(truth) == set(NAMED.values())
    assert ran.measured.errors == dict(truth)
    assert ran.measured.failed == truth.total() == 36
    assert ran.measured.ok == 44
    assert ran.measured.sent == 80
    details = {record.error: record.detail for record in ran.outcome.records if record.error}
    assert "engine died" in details["error_event"]
    assert "injected" in details["http"]


@pytest.mark.parametrize(
    "script",
    [
        Script(newline="\r\n", comments=True, split=True),
        Script(split=True, tokens_per_chunk=3, comments=True),
        Script(close=True),
        Script(events_per_write=5, newline="\r\n"),
        Script(role_chunk=False),
    ],
    ids=["crlf-comments-split", "split-drafts", "close-each", "merged-crlf", "no-role-chunk"],
)
def test_framing_makes_no_difference(fake: FakeServer, script: Script) -> None:
    ran = run(fake, script, Level(0, 3, requests=12, timeout_s=10), output_tokens=31)
    assert ran.measured.failed == 0, ran.measured.errors
    assert ran.measured.output_tokens == 31
    assert ran.summary.crosscheck is not None
    assert ran.summary.crosscheck.status == "agree"


def test_an_answer_that_is_no_stream(fake: FakeServer) -> None:
    ran = run(fake, Script(), Level(0, 1, requests=2, warmup=0, timeout_s=10), extra={"stream": False})
    assert ran.measured.errors == {"not_a_stream": 2}


def test_no_server_gives_up_and_says_why(fake: FakeServer) -> None:
    from loadtest import sweep
    from loadtest.plan import Workload

    nobody = Target("127.0.0.1", 9, False, "")
    settings = sweep.Settings(nobody, Workload(model="fake", words=60), metrics_url="")
    level = Level(0, 2, requests=1000, warmup=0, timeout_s=5)
    # Backoff makes a lane's failures take longer and longer; a few are enough to see the kind, so stop it early.
    outcome = _stopped_early(settings, level)
    assert {record.error for record in outcome.records} <= {"connect", CANCELLED}
    assert any(record.error == "connect" for record in outcome.records)


def _stopped_early(settings, level):  # type: ignore[no-untyped-def]
    from loadtest import sweep

    class Stopper(Silent):
        def live(self, level, shards) -> None:  # type: ignore[no-untyped-def]
            super().live(level, shards)
            if sum(shard.failed for shard in shards) >= 4 and not self.stopped:
                self.stopped = True
                raise KeyboardInterrupt

        stopped = False

    return sweep.run_level(settings, level, Stopper())


def test_slow_slots_are_waiting_not_errors(fake: FakeServer) -> None:
    ran = run(fake, Script(ttft_s=0.05, slots=2), Level(0, 6, requests=18, timeout_s=10), output_tokens=2)
    assert ran.measured.failed == 0
    assert ran.measured.ttft is not None
    assert ran.measured.ttft.p50 > 0.1


async def test_a_dead_server_is_given_up_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from time import perf_counter

    from loadtest import client
    from loadtest.plan import Share, Workload

    monkeypatch.setattr(client, "_BACKOFF_MAX_S", 0.001)  # else the pauses alone take 17 s
    share = Share(Target("127.0.0.1", 9, False, ""), Workload("m", words=40), Level(0, 2, requests=500), (0, 1), 500)
    mine = client.Client(share)
    await mine.run(perf_counter())
    assert mine.gave_up.startswith("12 failures in a row: connect")
    assert 12 <= len(mine.records) <= 26
