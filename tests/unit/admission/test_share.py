from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.admission.share import Claim, divide

claims = st.dictionaries(
    st.sampled_from("abcdef"), st.builds(Claim, st.integers(0, 50), st.integers(0, 500)), min_size=1
)


@given(st.integers(0, 300), claims)
def test_every_slot_is_given_once_and_to_whom_it_serves(total: int, asked: dict[str, Claim]) -> None:
    shares = divide(total, asked)
    running = sum(claim.running for claim in asked.values())
    assert set(shares) == set(asked)
    if not total:
        assert not any(shares.values())
        return
    assert all(shares.values()), "nobody is without a slot"
    if running <= total and total >= sum(max(1, claim.running) for claim in asked.values()):
        assert all(shares[name] >= claim.running for name, claim in asked.items()), "what runs, runs"
    if total >= running + len(asked):
        assert total <= sum(shares.values()) <= total + len(asked)
        starving = [n for n, c in asked.items() if shares[n] < c.running + c.waiting]
        if starving:
            idle = sum(max(0, shares[n] - max(1, c.running + c.waiting)) for n, c in asked.items())
            assert not idle, "a slot stays empty at one ingress while a request waits at another"


def test_by_hand() -> None:
    assert divide(8, {"a": Claim(), "b": Claim()}) == {"a": 4, "b": 4}
    assert divide(9, {"a": Claim(), "b": Claim()}) == {"a": 5, "b": 4}
    assert divide(200, {"a": Claim(100, 76), "b": Claim(24, 0)}) == {"a": 176, "b": 24}
    assert divide(200, {"a": Claim(100, 30), "b": Claim(24, 0)}) == {"a": 130, "b": 70}
    assert divide(8, {"a": Claim(4, 9), "b": Claim(4, 9)}) == {"a": 4, "b": 4}
    assert divide(1, {"a": Claim(), "b": Claim()}) == {"a": 1, "b": 1}
