"""Quantities of a level by name, for comparing, gating and plotting: `output_tok_s`, `ttft.p95`, ..."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

from loadtest.metrics import Spread
from loadtest.verdict import LevelSummary
from service.errors import UserError

_PLAIN = {  # name: (unit, more is better)
    "output_tok_s": ("tok/s", True),
    "peak_tok_s": ("tok/s", True),
    "request_s": ("req/s", True),
    "goodput.share": ("", True),
    "goodput.request_s": ("req/s", True),
    "failed_share": ("", False),
    "client_busy": ("", False),
}
_SPREADS = {  # latencies in the file are seconds; people speak of milliseconds
    "ttft": "ms",
    "ttfa": "ms",
    "itl": "ms",
    "icl": "ms",
    "tpot": "ms",
    "e2el": "ms",
    "per_user_tok_s": "tok/s",
}
_STATISTICS = tuple(field.name for field in fields(Spread) if field.name != "n")


@dataclass(frozen=True, slots=True)
class Quantity:
    name: str
    unit: str
    more_is_better: bool

    def of(self, level: LevelSummary) -> float | None:
        """In `unit`; None where the level has no such value."""
        m = level.measured
        if self.name == "failed_share":
            return m.failed / m.sent if m.sent else None
        if self.name == "client_busy":
            return level.client.busy if level.client else None
        first, _, rest = self.name.partition(".")
        part = getattr(m, first)
        value = getattr(part, rest) if rest and part is not None else part
        if value is None or value != value:  # NaN: not told by the tool that measured
            return None
        return float(value) * (1e3 if self.unit == "ms" else 1.0)


def names() -> list[str]:
    return [*_PLAIN, *(f"{metric}.{statistic}" for metric in _SPREADS for statistic in _STATISTICS)]


def quantity(name: str) -> Quantity:
    """Raises UserError that names the nearest known one."""
    if name in _PLAIN:
        unit, more = _PLAIN[name]
        return Quantity(name, unit, more)
    metric, _, statistic = name.partition(".")
    if metric in _SPREADS and statistic in _STATISTICS:
        return Quantity(name, _SPREADS[metric], metric == "per_user_tok_s")
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise UserError(
        f"no metric {name!r}{hint} Metrics: {', '.join(_PLAIN)}, and {'|'.join(_SPREADS)}.{'|'.join(_STATISTICS)}"
    )
