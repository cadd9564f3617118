"""Interpolation of measured tables. Sizes and times span decades, so everything here is linear in logarithms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured points (x > 0, y >= 0), x ascending. Between them log-log interpolation.

    Below the first point: its value (a latency floor). Above the last: the last two points' slope, linear (a bandwidth
    or compute limit), never falling; `flat_end` holds the last value instead.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    flat_end: bool = False

    @staticmethod
    def of(points: Iterable[tuple[float, float]], *, flat_end: bool = False) -> Curve:
        ordered = sorted({float(x): float(y) for x, y in points}.items())
        assert ordered, "a curve needs a point"
        assert all(x > 0 and y >= 0 for x, y in ordered)
        return Curve(tuple(x for x, _ in ordered), tuple(y for _, y in ordered), flat_end)

    @staticmethod
    def rising(points: Iterable[tuple[float, float]]) -> Curve:
        """As `of`, but never falling: a dip (a noisy row) is lifted to the greatest value before it."""
        best, lifted = 0.0, []
        for x, y in sorted(points):
            best = max(best, y)
            lifted.append((x, best))
        return Curve.of(lifted)

    def at(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        if x >= xs[-1]:
            if self.flat_end:
                return ys[-1]
            slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
            return ys[-1] + slope * (x - xs[-1])
        i = bisect_left(xs, x)
        share = (log(x) - log(xs[i - 1])) / (log(xs[i]) - log(xs[i - 1]))
        if ys[i - 1] <= 0 or ys[i] <= 0:
            return ys[i - 1] + share * (ys[i] - ys[i - 1])
        return exp(log(ys[i - 1]) + share * (log(ys[i]) - log(ys[i - 1])))
