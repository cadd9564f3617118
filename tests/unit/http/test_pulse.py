from typing import Any

import pytest

from service.errors import DeadlineExceeded
from service.http.pulse import ClientStalled, Pulse
from service.http.settings import HttpSettings

LIMITS = HttpSettings(first_byte_timeout_s=30, idle_timeout_s=10, keepalive_s=4, open_stream_after_s=6)


def pulse(**fields: Any) -> Pulse:
    return Pulse(started_at=0, timeout_s=100, **fields)


@pytest.mark.parametrize(
    ("state", "now", "due"),
    [
        ({}, 5, False),
        ({}, 6, True),  # nothing sent yet: the headers go out
        ({"served_at": 1}, 6, True),
        ({"served_at": 1, "sent_at": 6}, 9, False),
        ({"served_at": 1, "sent_at": 6}, 10, True),
        ({"served_at": 1, "sent_at": 6, "writing": True}, 10, False),
        ({"served_at": 1, "heard_at": 8, "sent_at": 8}, 11, False),
        ({"served_at": 1, "heard_at": 8, "sent_at": 8}, 12, True),
    ],
)
def test_when_to_speak(state: dict[str, Any], now: float, due: bool) -> None:
    speak, again = pulse(**state).judge(now, LIMITS)
    assert speak is due
    assert again > now


@pytest.mark.parametrize(
    ("state", "now", "says"),
    [
        ({}, 100, "longer than its 100"),
        ({"served_at": 99, "heard_at": 99.9, "sent_at": 99.9}, 100, "longer than its 100"),
        ({"served_at": 1}, 31, "first 30 s"),
        ({"served_at": 1, "heard_at": 40, "sent_at": 49}, 50, "nothing for 10 s"),
    ],
)
def test_deadlines(state: dict[str, Any], now: float, says: str) -> None:
    with pytest.raises(DeadlineExceeded, match=says):
        pulse(**state).judge(now, LIMITS)
    pulse(**state).judge(now - 0.5, LIMITS)


def test_waiting_for_a_place_is_bounded_by_the_whole_deadline_only() -> None:
    assert pulse().judge(99, LIMITS)[1] <= 100


def test_a_client_that_does_not_read_is_not_an_engine_that_does_not_write() -> None:
    with pytest.raises(ClientStalled):
        pulse(served_at=0, heard_at=1, sent_at=1, writing=True).judge(11, LIMITS)


@pytest.mark.parametrize("happens", ["served_at", "heard_at", "sent_at"])
def test_what_happens_right_after_a_look_is_not_judged_late(happens: str) -> None:
    """The next look comes before any deadline that an event just after this one could start."""
    before = pulse(**({"served_at": 0.0} if happens != "served_at" else {}))
    _, again = before.judge(1, LIMITS)
    limit = {"served_at": 30, "heard_at": 10, "sent_at": 4}[happens]
    assert again <= 1 + limit
