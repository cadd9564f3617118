"""Our own books against the engines': who runs a request that nobody waits for, who waits for one that nobody runs.

Pure. Either side keeps a `Watch` over the requests it has and feeds it what the other side says. A side's word counts
by its beats, not by clocks: the first post that we read after a request began, and that does not name it, may be older
than the request; `BEATS` further ones are proof. A process that is gone from the board is proof at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BEATS = 2
"""Posts without the request, after the first that we read."""


@dataclass(frozen=True, slots=True)
class Word:
    """What a process on the other side last said: how many posts it has made, and the requests it names."""

    beat: int
    ids: frozenset[str]


@dataclass(slots=True)
class _Watched:
    keeper: str | None
    """The process that has the request; None until one names it."""
    known: bool
    """The keeper was on the board."""
    beat: int = -1
    """The keeper's last post that named it, or the first that we read; -1 before."""


@dataclass
class Watch:
    """The requests of one process, and who on the other side has them."""

    _watched: dict[str, _Watched] = field(default_factory=dict)

    def begin(self, id: str, keeper: str | None = None, *, known: bool = False) -> None:
        """`keeper`: the process that has it, None where it must first be seen; `known`: it is on the board."""
        self._watched[id] = _Watched(keeper, known)

    def end(self, id: str) -> None:
        self._watched.pop(id, None)

    def lost(self, words: Mapping[str, Word]) -> list[str]:
        """Requests whose keeper is gone, or says no more that it has them. `words`: by process, all that live."""
        named = {id: process for process, word in words.items() for id in word.ids}
        return [id for id, watched in self._watched.items() if self._is_lost(watched, named.get(id), words)]

    def keeper_lives(self, id: str, words: Mapping[str, Word]) -> bool:
        """Whether the process that had the request is there: then it has ended it, and what it said last may still be
        on its way."""
        watched = self._watched.get(id)
        return watched is not None and watched.keeper in words

    @staticmethod
    def _is_lost(watched: _Watched, named_by: str | None, words: Mapping[str, Word]) -> bool:
        if named_by is not None:
            watched.keeper, watched.known, watched.beat = named_by, True, words[named_by].beat
            return False
        if watched.keeper is None:
            return False
        word = words.get(watched.keeper)
        if word is None:
            # Gone; but one that never was on the board has only not come yet.
            return watched.known
        watched.known = True
        if watched.beat < 0:
            watched.beat = word.beat
            return False
        return word.beat >= watched.beat + BEATS


def words(entries: Iterable[tuple[str, int, Iterable[str]]]) -> dict[str, Word]:
    """From (process, beat, ids)."""
    return {process: Word(beat, frozenset(ids)) for process, beat, ids in entries}
