"""One thing that is wrong with a manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`where`: object or container; `what`: what is wrong and what would be right."""

    where: str
    what: str
