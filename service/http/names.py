"""Which model a name means: its own, or an alias that the profile allows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from service.errors import ModelNotFound
from service.http.validate import nearest
from service.types import ModelCard

LONGEST = 256
"""Characters of a name that can be an alias."""


def find_model(name: str, cards: Sequence[ModelCard], aliases: Sequence[str]) -> ModelCard:
    """`aliases`: globs; they mean the first card. Raises ModelNotFound."""
    for card in cards:
        if card.name == name:
            return card
    if cards and len(name) <= LONGEST and any(fnmatchcase(name, alias) for alias in aliases):
        return cards[0]
    near = nearest(name, [card.name for card in cards])
    raise ModelNotFound(f"the model {name[:128]!r} does not exist{near}", param="model")
