from __future__ import annotations

from service.scaling.reading import DemandWord, ReplicaWord, read
from service.types import EngineStats


def stats(running: int = 0, tokens: int = 0, busy_s: float = 0.0) -> EngineStats:
    return EngineStats(slots=4, running=running, output_tokens=tokens, busy_s=busy_s)


def test_a_replica_that_ray_forgot_drains() -> None:
    words = [ReplicaWord("a", True, stats(3)), ReplicaWord("b", True, stats(2))]
    found = read(1, {"a"}, words, [])
    assert (found.ready, found.alive, found.draining, found.running, found.held) == (1, 1, 1, 3, 2)


def test_a_replica_that_loads_is_neither_ready_nor_draining() -> None:
    words = [ReplicaWord("a", True, stats(1, 1000, 10.0), 5.0), ReplicaWord("new", False, stats(9, 9, 9.0))]
    found = read(2, {"a"}, words, [])
    assert (found.ready, found.draining, found.running) == (1, 0, 1)
    assert found.tokens_per_s == 100.0, "its samples are not looked at"
    assert found.start_s == 5.0


def test_demand_of_all_ingresses_is_one() -> None:
    found = read(1, set(), [], [DemandWord(3, 1, 2.5, 100.0), DemandWord(4, 0, 0.5, 50.0)], last_start_s=7.0)
    assert (found.waiting, found.missed, found.priority_wait_s, found.queued_tokens) == (7, 1, 2.5, 150.0)
    assert found.tokens_per_s is None and found.start_s == 7.0


def test_a_rate_from_little_work_is_noise() -> None:
    assert read(1, {"a"}, [ReplicaWord("a", True, stats(1, 100, 0.5))], []).tokens_per_s is None
