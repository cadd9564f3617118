"""Replicas whose process died while they loaded: how many of each pool, and why. Pure; what lives is passed in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from service.fleet.post import Post
from service.types import PoolName

TELLING = re.compile(r"assert|abort|fatal|fail|error|terminate|out of memory|received at", re.IGNORECASE)
MOST_WORDS = 300


class Loads:
    """As followed from the posts, reading after reading."""

    def __init__(self) -> None:
        self.deaths: Counter[PoolName] = Counter()
        """Since a replica of the pool was last ready."""
        self.reason: dict[PoolName, str] = {}
        """Of the latest death, in a sentence."""
        self._loading: dict[str, Post] = {}

    def observe(self, posts: Iterable[Post], lives: Callable[[Post], bool], words: Callable[[Post], str]) -> None:
        """`lives`: whether the process of a post that is missing still runs; `words`: the end of what it printed."""
        replicas = {post.id: post for post in posts if post.role == "replica" and post.pool is not None}
        for id, before in list(self._loading.items()):
            if id in replicas or lives(before):
                continue
            del self._loading[id]
            assert before.pool is not None
            self.deaths[before.pool] += 1
            said = telling(words(before))
            self.reason[before.pool] = f"its process died in the phase {before.phase}" + (f": {said}" if said else "")
        for id, post in replicas.items():
            if post.ready and post.pool is not None:
                self._loading.pop(id, None)
                self.deaths.pop(post.pool, None)
                self.reason.pop(post.pool, None)
            elif post.stats is None:  # one that drains has been ready
                self._loading[id] = post


def telling(words: str) -> str:
    """The first line that names a fault, or nothing."""
    for line in words.splitlines():
        if TELLING.search(line):
            return " ".join(line.split())[:MOST_WORDS]
    return ""
