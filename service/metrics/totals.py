"""The snapshots of all processes that are or were: totals that neither fall when one goes nor count one twice."""

from __future__ import annotations

from collections import OrderedDict

from service.metrics.exchange import fold

REMEMBERED = 128


class Totals:
    """Latest snapshot of each process by an id that no other process ever has.

    A process that is only silent (its event loop was held for seconds) looks like one that is gone, and then speaks
    again: its last counts are kept apart under its id, so that its next snapshot replaces them. Only the oldest of more
    than `remembered` gone processes are folded into one base for good; so memory stays bounded.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._live: dict[str, bytes] = {}
        self._gone: OrderedDict[str, bytes] = OrderedDict()
        self._base = b""
        self._remembered = remembered

    def put(self, id: str, snapshot: bytes) -> None:
        """What `id` says now; also where it was thought to be gone."""
        self._gone.pop(id, None)
        self._live[id] = snapshot

    def gone(self, id: str) -> None:
        """`id` left or fell silent: its counters stay, its gauges end. Harmless where it is unknown or gone already."""
        snapshot = self._live.pop(id, None)
        if snapshot is None:
            return
        self._gone[id] = fold(b"", snapshot)
        while len(self._gone) > self._remembered:
            _, oldest = self._gone.popitem(last=False)
            self._base = fold(self._base, oldest)

    def snapshots(self) -> list[bytes]:
        """For `exchange.merge`."""
        return [*([self._base] if self._base else []), *self._gone.values(), *self._live.values()]
