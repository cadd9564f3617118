"""Whose seconds and whose tokens: the exact integration behind tok/s at a given concurrency."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import Counter

from service.metrics.labels import CONCURRENCY, concurrency_index


class Ledger:
    """Time and tokens of one replica, booked under the number of requests decoding at that moment.

    Every change of that number books the time since the last change; so the seconds over all buckets are the seconds
    in which at least one request was decoding, and the tokens over all buckets are all tokens. One thread writes.
    `clock` is monotonic, in seconds.
    """

    def __init__(self, tokens: Sequence[Counter], busy: Sequence[Counter], clock: Callable[[], float]) -> None:
        assert len(tokens) == len(busy) == len(CONCURRENCY)
        self.decoding = 0
        self.request_seconds = 0.0
        """Integral of `decoding` over time."""
        self._tokens, self._busy, self._clock = tokens, busy, clock
        self._seconds = [0.0] * len(CONCURRENCY)
        self._since = clock()
        self._index = 0

    @property
    def busy_seconds(self) -> float:
        return sum(self._seconds)

    def join(self) -> None:
        self._change(1)

    def leave(self) -> None:
        assert self.decoding > 0, "a request left that had not joined"
        self._change(-1)

    def produced(self, tokens: int) -> None:
        """Tokens of a request that has joined."""
        self._tokens[self._index].inc(tokens)

    def mark(self) -> tuple[float, ...]:
        """Seconds by bucket up to now: the start of a span for `produced_since`."""
        self.settle()
        return tuple(self._seconds)

    def produced_since(self, mark: tuple[float, ...], tokens: int) -> None:
        """Tokens that came all at once but were made over the span since `mark`: shared out by time in each bucket."""
        self.settle()
        spans = [now - then for now, then in zip(self._seconds, mark, strict=True)]
        total = sum(spans)
        if total <= 0:
            self.produced(tokens)
            return
        for counter, span in zip(self._tokens, spans, strict=True):
            if span:
                counter.inc(tokens * span / total)

    def settle(self) -> None:
        """Book the time since the last change of the set."""
        now = self._clock()
        passed, self._since = now - self._since, now
        if self.decoding and passed > 0:
            self._busy[self._index].inc(passed)
            self._seconds[self._index] += passed
            self.request_seconds += passed * self.decoding

    def _change(self, by: int) -> None:
        self.settle()
        self.decoding += by
        if self.decoding:
            self._index = concurrency_index(self.decoding)
