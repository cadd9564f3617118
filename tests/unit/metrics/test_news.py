"""Snapshots that are sent: news, and an old one now and then."""

from __future__ import annotations

from service.metrics.news import News


def test_what_changed_is_sent_at_once_and_what_did_not_now_and_then() -> None:
    news = News(again_s=2.0)
    assert news.pick(b"a", 100.0) == b"a"
    assert news.pick(b"a", 101.9) is None
    assert news.pick(b"a", 102.0) == b"a"  # whoever forgot it has it again
    assert news.pick(b"a", 103.9) is None
    assert news.pick(b"b", 103.9) == b"b"
    assert news.pick(b"b", 105.8) is None
    assert news.pick(b"b", 105.9) == b"b"


def test_the_first_one_is_sent_whatever_the_clock_says() -> None:
    assert News(again_s=2.0).pick(b"a", 0.0) == b"a"
