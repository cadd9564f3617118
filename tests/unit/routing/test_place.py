from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from service.routing.place import CROWD, Candidate, place

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


SESSIONS = [f"session {i}" for i in range(200)]


def test_a_session_comes_home_from_every_ingress_and_a_lost_replica_moves_only_its_own() -> None:
    three = [Candidate(id, 8) for id in "abc"]
    homes = {session: place(three, session=session) for session in SESSIONS}
    assert set(homes.values()) == {"a", "b", "c"}
    assert homes == {session: place(three[::-1], turn=2, session=session) for session in SESSIONS}
    two = {session: place(three[:2], session=session) for session in SESSIONS}
    assert all(two[session] == home for session, home in homes.items() if home != "c")


def test_a_session_does_not_wait_for_a_full_home_nor_return_to_a_failed_one() -> None:
    for session in SESSIONS:
        home = place([Candidate("a", 2), Candidate("b", 2)], session=session)
        other = "b" if home == "a" else "a"
        full = [Candidate(id, 2, 0, 2 if id == home else 1) for id in "ab"]
        assert place(full, session=session) == other
        assert place([Candidate("a", 2), Candidate("b", 2)], {str(home)}, session=session) == other


def test_callers_who_begin_alike_do_not_crowd_one_replica() -> None:
    """Requests of one opening, one after the other, none ending: each replica within its bound, and the home first."""
    loads = dict.fromkeys("abcd", 0)
    placed = []
    for number in range(200):
        found = place([Candidate(id, 64, load) for id, load in loads.items()], session="hello")
        assert found is not None
        loads[found] += 1
        placed.append(found)
        assert max(loads.values()) <= math.ceil(CROWD * (number + 1) / 4)
    assert max(loads, key=lambda id: loads[id]) == placed[0]
    # By their slots: a replica of 8 beside one of 24 has a quarter of the load as its share.
    pair = [Candidate("a", 8, 5), Candidate("b", 24, 11)]
    homes = {place(pair, session=session) for session in SESSIONS}
    assert homes == {"a", "b"}
    assert {place([Candidate("a", 8, 6), pair[1]], session=session) for session in SESSIONS} == {"b"}
