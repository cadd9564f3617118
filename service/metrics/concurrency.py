"""Whose seconds and whose tokens: the exact integration behind tok/s at a given concurrency."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import Counter

from service.metrics.labels import CONCURRENCY, concurrency_index

LOG_ENTRIES = 2048


class Ledger:
    """Time and tokens of one replica, booked under the number of requests decoding at that moment.

    Every change of that number books the time since the last change; so the seconds over all buckets are the seconds
    in which at least one request was decoding. A request's tokens are booked over the span in which they were made,
    which is the time since its tokens before them, in proportion to the time spent in each bucket: eight requests that
    start together all have their tokens under 5-8, although their first tokens come one after the other.
    One thread writes. `clock` is monotonic, in seconds.
    """

    def __init__(self, tokens: Sequence[Counter], busy: Sequence[Counter], clock: Callable[[], float]) -> None:
        assert len(tokens) == len(busy) == len(CONCURRENCY)
        self.clock = clock
        self.decoding = 0
        self.request_seconds = 0.0
        """Integral of `decoding` over time."""
        self.busy_seconds = 0.0
        self.current = tokens[0]
        """Where tokens made in the present bucket belong."""
        self.epoch = 0
        """Number of the last change of bucket."""
        self._tokens, self._busy = tokens, busy
        self._since = clock()
        self._index = 0
        self._log: list[tuple[float, int]] = [(self._since, 0)]
        """(when, bucket) of the latest changes of bucket; the last one has the number `epoch`."""

    def join(self) -> None:
        self._change(1)

    def leave(self) -> None:
        assert self.decoding > 0, "a request left that had not joined"
        self._change(-1)

    def spread(self, tokens: int, epoch: int, since: float, now: float) -> None:
        """Book tokens made from `since` (when `epoch` was the last change) until `now`."""
        oldest = self.epoch - len(self._log) + 1
        log = self._log[max(0, epoch - oldest) :]
        spans: dict[int, float] = {}
        for at, (start, index) in enumerate(log):
            end = log[at + 1][0] if at + 1 < len(log) else now
            span = end - max(start, since)
            if span > 0:
                spans[index] = spans.get(index, 0.0) + span
        total = sum(spans.values())
        if total <= 0:
            self.current.inc(tokens)
            return
        for index, span in spans.items():
            self._tokens[index].inc(tokens * span / total)

    def settle(self) -> None:
        """Book the time since the last change of the set."""
        now = self.clock()
        passed, self._since = now - self._since, now
        if self.decoding and passed > 0:
            self._busy[self._index].inc(passed)
            self.busy_seconds += passed
            self.request_seconds += passed * self.decoding

    def _change(self, by: int) -> None:
        self.settle()
        self.decoding += by
        if not self.decoding:
            return
        index = concurrency_index(self.decoding)
        if index != self._index:
            self._index, self.current = index, self._tokens[index]
            self.epoch += 1
            self._log.append((self._since, index))
            if len(self._log) > LOG_ENTRIES:
                # Older changes matter only to a request that was silent for as long: its share is then cut there.
                del self._log[: LOG_ENTRIES // 2]
