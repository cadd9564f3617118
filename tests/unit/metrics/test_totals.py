"""Totals over processes that come, fall silent, come back and go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from service.metrics.declared import Metrics
from service.metrics.exchange import merge, snapshot
from service.metrics.recorders import ReplicaRecorder
from service.metrics.totals import Totals
from service.types import Delta, EngineStats
from tests.unit.metrics.read import samples, total


class Process:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.replica = ReplicaRecorder(self.metrics, "shared", 8)

    def work(self, tokens: int) -> bytes:
        with self.replica.request("default") as request:
            request.chunk(Delta(output_tokens=tokens))
        self.replica.engine(EngineStats(8))
        return snapshot(self.metrics)


def read(totals: Totals) -> tuple[float, float]:
    """(output tokens, slots) of the service."""
    found = samples(merge(totals.snapshots()))
    return total(found, "glm_output_tokens_total"), total(found, "glm_slots")


def test_a_silent_process_that_speaks_again_is_not_counted_twice() -> None:
    totals, process = Totals(), Process()
    totals.put("a", process.work(5))
    assert read(totals) == (5, 8)
    totals.gone("a")
    totals.gone("a")
    totals.gone("never seen")
    assert read(totals) == (5, 0)  # its counts stay, its slots do not
    totals.put("a", process.work(2))
    assert read(totals) == (7, 8)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["work", "gone", "new"]), st.integers(0, 9), st.integers(1, 5)), max_size=40))
def test_totals_are_all_that_was_ever_counted(script: list[tuple[str, int, int]]) -> None:
    """With room for many gone processes nothing is folded while it may come back."""
    totals, processes, alive = Totals(remembered=100), [Process()], set()
    expected = 0
    for what, which, tokens in script:
        at = which % len(processes)
        if what == "new":
            processes.append(Process())
        elif what == "gone":
            totals.gone(str(at))
            alive.discard(at)
        else:
            totals.put(str(at), processes[at].work(tokens))
            alive.add(at)
            expected += tokens
        assert read(totals) == (expected, 8 * len(alive))


def test_many_gone_processes_take_little_room() -> None:
    totals, leaving = Totals(remembered=4), Process().work(3)
    for number in range(50):
        totals.put(str(number), leaving)
        totals.gone(str(number))
    assert (totals.apart, len(totals.snapshots())) == (4, 1)
    assert read(totals) == (150, 0)
