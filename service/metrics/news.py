"""Which snapshots a process sends: those that say something new, and now and then one that does not."""

from __future__ import annotations

AGAIN_S = 2.0
"""A board that was restarted, or took the process for gone, has all of an idle process's metrics after this long."""


class News:
    """What one process has sent of its metrics."""

    def __init__(self, again_s: float = AGAIN_S) -> None:
        self._last = b""
        self._sent_at = 0.0
        self._again_s = again_s

    def pick(self, snapshot: bytes, now: float) -> bytes | None:
        """`snapshot` if it is to be sent: it differs from the last one sent, or that was sent `again_s` ago."""
        if snapshot == self._last and now - self._sent_at < self._again_s:
            return None
        self._last, self._sent_at = snapshot, now
        return snapshot
