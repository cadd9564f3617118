"""The snapshots of all processes that are or were: totals that neither fall when one goes nor count one twice."""

from __future__ import annotations

from collections import OrderedDict

from service.metrics.exchange import fold

REMEMBERED = 128


class Totals:
    """Latest snapshot of each process by an id that no other process ever has.

    A process that is only silent (its event loop was held for seconds) looks like one that is gone, and then speaks
    again: its last counts are kept apart under its id, so that its next snapshot replaces them. Only the oldest of more
    than `remembered` gone processes are folded into one base for good; so memory stays bounded. One of those that
    speaks again all the same counts twice: `remembered` is to be more than can be silent at once.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._live: dict[str, bytes] = {}
        self._gone: OrderedDict[str, bytes] = OrderedDict()
        self._base = b""
        self._gone_sum: bytes | None = b""
        """Base and gone ones in one, made again only when either changed: a scrape is to carry and add up one."""
        self._remembered = remembered

    def put(self, id: str, snapshot: bytes) -> None:
        """What `id` says now; also where it was thought to be gone."""
        if self._gone.pop(id, None) is not None:
            self._gone_sum = None
        self._live[id] = snapshot

    def gone(self, id: str) -> None:
        """`id` left or fell silent: its counters stay, its gauges end. Harmless where it is unknown or gone already."""
        snapshot = self._live.pop(id, None)
        if snapshot is None:
            return
        self._gone[id] = fold(b"", snapshot)
        self._gone_sum = None
        while len(self._gone) > self._remembered:
            _, oldest = self._gone.popitem(last=False)
            self._base = fold(self._base, oldest)

    @property
    def apart(self) -> int:
        """How many gone processes are still kept apart: never more than `remembered`."""
        return len(self._gone)

    def snapshots(self) -> list[bytes]:
        """For `exchange.merge`: one of each live process, and one, first, of all that are gone."""
        if self._gone_sum is None:
            self._gone_sum = self._base
            for snapshot in self._gone.values():
                self._gone_sum = fold(self._gone_sum, snapshot)
        return [*([self._gone_sum] if self._gone_sum else []), *self._live.values()]
