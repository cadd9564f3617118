"""Whether the other end of a connection still lives, counted in looks. Pure: has no clock.

A process that was stopped itself must not blame its peer when it wakes: by the clock the peer was silent all the while,
by looks it missed one. So silence counts only where this process ran, looked, and found nothing.
"""

from __future__ import annotations

LOOK_S = 1.0
"""Time between two looks; each side says something at least as often."""
LOOKS = 15
"""Looks without a byte that prove the peer gone. A killed process is known at once (its socket closes); this is for a
machine that vanished, or a process that is stopped."""


class Heartbeat:
    """Of one connection, seen from one side."""

    def __init__(self, looks: int = LOOKS) -> None:
        self._looks = looks
        self._missed = 0
        self._heard = self._said = False

    def heard(self) -> None:
        """Something came from the peer."""
        self._heard = True

    def said(self) -> None:
        """Something was sent to the peer."""
        self._said = True

    def look(self) -> tuple[bool, bool]:
        """(the peer is gone, a beat is due). Call every `LOOK_S`."""
        self._missed = 0 if self._heard else self._missed + 1
        due = not self._said
        self._heard = self._said = False
        return self._missed >= self._looks, due
