from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.routing.place import Candidate, place

candidates = st.lists(
    st.builds(
        Candidate,
        st.text("abcdef", min_size=1, max_size=3),
        st.integers(0, 8),
        st.integers(0, 8),
        st.integers(0, 8),
        st.integers(0, 2),
    ),
    unique_by=lambda c: c.id,
    max_size=6,
)


@given(candidates, st.sets(st.text("abcdef", min_size=1, max_size=3), max_size=3), st.booleans(), st.integers(0, 9))
def test_the_one_with_the_most_room(found: list[Candidate], avoid: set[str], alone: bool, turn: int) -> None:
    chosen = place(found, avoid, alone=alone, turn=turn)
    allowed = {c.id: c for c in found if not (alone and c.suspects)}
    if chosen is None:
        assert not allowed
        return
    one = allowed[chosen]
    rivals = [c for c in allowed.values() if c.id not in avoid] or list(allowed.values())
    assert one in rivals
    assert one.slots - one.mine - one.others == max(c.slots - c.mine - c.others for c in rivals)


def test_idle_equals_go_to_different_ingresses_in_turn() -> None:
    idle = [Candidate(id, 1) for id in ("a", "b", "c")]
    assert [place(idle, turn=turn) for turn in range(4)] == ["a", "b", "c", "a"]


def test_one_s_own_requests_count_before_the_word_of_them_is_back() -> None:
    assert place([Candidate("a", 4, mine=1), Candidate("b", 4)]) == "b"
    assert place([Candidate("a", 4, mine=1), Candidate("b", 4, others=2)]) == "a"


def test_a_failed_replica_is_taken_where_there_is_no_other() -> None:
    assert place([Candidate("a", 4), Candidate("b", 1, mine=9)], avoid={"a"}) == "b"
    assert place([Candidate("a", 4)], avoid={"a"}) == "a"


def test_a_suspect_is_alone_or_nowhere() -> None:
    assert place([Candidate("a", 4, suspects=1), Candidate("b", 1, mine=9)], alone=True) == "b"
    assert place([Candidate("a", 4, suspects=1)], alone=True) is None
