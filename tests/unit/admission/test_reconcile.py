"""Proof that a request is lost: two posts without it, or no process any more. Everything less is patience."""

from __future__ import annotations

from service.admission.reconcile import Watch, Word


def says(beat: int, *ids: str) -> dict[str, Word]:
    return {"p": Word(beat, frozenset(ids))}


def test_a_request_that_is_named_is_not_lost() -> None:
    watch = Watch()
    watch.begin("r", "p", known=True)
    for beat in range(20):
        assert watch.lost(says(beat, "r")) == []


def test_a_request_that_was_dropped_is_lost_after_two_posts() -> None:
    watch = Watch()
    watch.begin("r")
    assert watch.lost(says(5, "r")) == []
    assert watch.lost(says(6)) == []
    assert watch.lost(says(6)) == [], "the same post read twice is one post"
    assert watch.lost(says(7)) == ["r"]


def test_a_post_from_before_the_request_is_no_proof() -> None:
    watch = Watch()
    watch.begin("r", "p", known=True)
    assert watch.lost(says(9)) == [], "may have been on its way"
    assert watch.lost(says(10)) == []
    assert watch.lost(says(11, "r")) == []


def test_never_named_and_never_coming() -> None:
    watch = Watch()
    watch.begin("r", "p", known=True)
    assert watch.lost(says(9)) == []
    assert watch.lost(says(11)) == ["r"]


def test_a_process_that_is_gone_is_proof() -> None:
    watch = Watch()
    watch.begin("r", "p", known=True)
    assert watch.lost({}) == ["r"]
    watch.begin("s", "new", known=False)
    assert "s" not in watch.lost({}), "one that was never there has only not come yet"
    watch.end("r")
    assert watch.lost({}) == []


def test_waiting_to_be_seen_is_not_lost() -> None:
    """A request that Serve still holds for a replica that starts is in nobody's books."""
    watch = Watch()
    watch.begin("r")
    for beat in range(50):
        assert watch.lost(says(beat)) == []


def test_a_move_to_another_replica_is_followed() -> None:
    watch = Watch()
    watch.begin("r")
    watch.lost({"p": Word(3, frozenset("r")), "q": Word(80, frozenset())})
    assert watch.lost({"p": Word(9, frozenset()), "q": Word(81, frozenset("r"))}) == []
    assert watch.lost({"q": Word(82, frozenset())}) == []
    assert watch.lost({"q": Word(83, frozenset())}) == ["r"]


def test_who_ended_a_request_and_lives_may_still_be_heard() -> None:
    watch = Watch()
    watch.begin("r")
    watch.lost(says(1, "r"))
    assert watch.lost(says(3)) == ["r"]
    assert watch.keeper_lives("r", says(3))
    assert not watch.keeper_lives("r", {})
    assert not watch.keeper_lives("unknown", says(3))
