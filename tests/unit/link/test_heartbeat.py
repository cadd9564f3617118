from __future__ import annotations

from service.link.heartbeat import Heartbeat


def test_a_beat_is_due_where_nothing_was_said() -> None:
    heart = Heartbeat(looks=3)
    heart.heard()
    assert heart.look() == (False, True)
    heart.heard()
    heart.said()
    assert heart.look() == (False, False)


def test_silence_counts_in_looks_and_a_byte_forgives_all() -> None:
    heart = Heartbeat(looks=3)
    assert [heart.look()[0] for _ in range(2)] == [False, False]
    heart.heard()
    assert [heart.look()[0] for _ in range(4)] == [False, False, False, True]
