from __future__ import annotations

import pytest

from service.errors import KillsReplica
from service.fleet.retry import CONDEMNED_S, MOST_CONDEMNED, Condemned, Tries, fingerprint


def test_one_death_is_bad_luck() -> None:
    tries = Tries()
    assert not tries.suspect
    assert tries.died(0) == "again" and tries.suspect


def test_the_second_death_of_an_only_suspect_condemns() -> None:
    tries = Tries()
    tries.died(0)
    assert tries.died(1) == "condemned"


def test_among_suspects_one_more_try_alone_decides() -> None:
    tries = Tries()
    tries.died(0)
    assert tries.died(5) == "alone"
    assert tries.died(1) == "condemned"


def test_no_request_takes_more_than_three_replicas() -> None:
    tries = Tries()
    assert [tries.died(9) for _ in range(3)] == ["again", "alone", "condemned"]


def test_a_condemned_request_is_refused_whoever_asks_and_for_a_while() -> None:
    condemned = Condemned()
    condemned.check("chat", b"poison", 0.0)
    condemned.add(fingerprint("chat", b"poison"), 0.0)
    with pytest.raises(KillsReplica) as found:
        condemned.check("chat", b"poison", 10.0)
    assert found.value.status == 422 and found.value.code == "request_kills_replica"
    assert found.value.retry_after_s == CONDEMNED_S - 10.0
    condemned.check("completions", b"poison", 10.0)
    condemned.check("chat", b"harmless", 10.0)
    condemned.check("chat", b"poison", CONDEMNED_S)
    assert not len(condemned)


def test_the_list_is_bounded_and_the_oldest_go_first() -> None:
    condemned = Condemned()
    for i in range(MOST_CONDEMNED + 1):
        condemned.add(fingerprint("chat", b"%d" % i), float(i) / 1e6)
    assert len(condemned) == MOST_CONDEMNED
    condemned.check("chat", b"0", 1.0)
    with pytest.raises(KillsReplica):
        condemned.check("chat", b"1", 1.0)
