"""Student's t and Welch's interval on log ratios. Pure, no dependency beyond math.

Source: B. L. Welch, Biometrika 34 (1947) 28-35; the incomplete beta by its continued fraction (Abramowitz and Stegun
26.5.8), the quantile by bisection. Throughputs are ratios by nature, so the interval is built on their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Ratio:
    """after / before: geometric mean, and its interval; `low`, `high` None with fewer than 3 repeats on a side."""

    value: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """higher, lower, within noise (the interval spans 1), or unknown (no interval)."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low > 1:
            return "higher"
        return "lower" if self.high < 1 else "within noise"


def ratio(before: Sequence[float], after: Sequence[float], confidence: float = 0.95) -> Ratio:
    """Both sequences positive and not empty."""
    assert before and after and min(*before, *after) > 0
    x, y = [math.log(v) for v in before], [math.log(v) for v in after]
    difference = sum(y) / len(y) - sum(x) / len(x)
    if len(x) < MIN_REPEATS or len(y) < MIN_REPEATS:
        return Ratio(math.exp(difference), None, None)
    a, b = _variance(x) / len(x), _variance(y) / len(y)
    if a + b == 0:
        return Ratio(math.exp(difference), math.exp(difference), math.exp(difference))
    freedom = (a + b) ** 2 / (a**2 / (len(x) - 1) + b**2 / (len(y) - 1))
    half = t_quantile(0.5 + confidence / 2, freedom) * math.sqrt(a + b)
    return Ratio(math.exp(difference), math.exp(difference - half), math.exp(difference + half))


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def t_quantile(p: float, freedom: float) -> float:
    """The t below which lies the share `p` (0.5 < p < 1) of Student's distribution."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, freedom: float) -> float:
    """For t >= 0."""
    return 1 - 0.5 * _beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(1 - x))
    # Lentz's method; `tiny` keeps the divisions away from zero.
    tiny = 1e-300
    d = 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    c, value = 1.0, d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / (c if abs(c) > tiny else tiny)
            value *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return front * value / a
