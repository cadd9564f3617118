"""What is pinned on the board: the latest word of each process, and the metrics of all that are or were.

Pure but for the clock and the look at a pid, which are given; the actor (board.py) holds one of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson
import psutil

from service.metrics.totals import Totals

STALE_S = 5.0
HUNG_S = 10.0
LOADING_S = 300.0
"""A replica that loads may be silent for long: llama.cpp's loader keeps Python's lock."""


def lives(pid: int) -> bool:
    """Whether there is such a process on this machine that has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@dataclass
class _Pin:
    seen: float
    post: bytes = b""
    native: str = ""
    local_pid: int = 0
    loading: bool = False


class Pins:
    """Everybody's latest word, by an id that no other process ever has.

    A process on `node` is gone when its pid is; one elsewhere when it has not spoken for `STALE_S` (here too, after
    `HUNG_S`: it hangs), or for `LOADING_S` where it loads. A gone process's post and native text go at once, what it
    counted stays. If it speaks again its counts stay as they were until it sends metrics, which then take their place.
    """

    def __init__(
        self, node: str, clock: Callable[[], float] = time.monotonic, alive: Callable[[int], bool] = lives
    ) -> None:
        self._node, self._clock, self._alive = node, clock, alive
        self._pins: dict[str, _Pin] = {}
        self._totals = Totals()
        self._born = clock()

    def pin(self, id: str, post: bytes | None, metrics: bytes | None, native: str | None = None) -> None:
        """A process says something; None leaves what it said before."""
        entry = self._pins.setdefault(id, _Pin(self._clock()))
        entry.seen = self._clock()
        if post is not None:
            entry.post = post
            tree = orjson.loads(post)
            entry.local_pid = tree["pid"] if tree["node"] == self._node else 0
            entry.loading = tree["role"] == "replica" and not tree["ready"]
        if metrics is not None:
            self._totals.put(id, metrics)
        if native is not None:
            entry.native = native

    def unpin(self, id: str) -> None:
        """A process is gone: what it counted stays in the totals."""
        self._pins.pop(id, None)
        self._totals.gone(id)

    def posts(self) -> tuple[float, list[bytes]]:
        """(age of this board in seconds, everybody's latest post)."""
        self._drop_gone()
        return self._clock() - self._born, [entry.post for entry in self._pins.values() if entry.post]

    def metrics(self) -> tuple[list[bytes], dict[str, str]]:
        """Snapshots of all processes (gone ones folded into one) and each replica's native text."""
        self._drop_gone()
        return self._totals.snapshots(), {id: entry.native for id, entry in self._pins.items() if entry.native}

    def _drop_gone(self) -> None:
        now = self._clock()
        for id, entry in list(self._pins.items()):
            dead = entry.local_pid and not self._alive(entry.local_pid)
            patience = LOADING_S if entry.loading else HUNG_S if entry.local_pid else STALE_S
            if dead or now - entry.seen > patience:
                self.unpin(id)
