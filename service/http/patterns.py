"""How large a grammar the `pattern` of a JSON schema makes: counted, never compiled or run."""

from __future__ import annotations

import re
from typing import Final

MAX_LENGTH: Final = 512
MAX_SIZE: Final = 2000
"""Characters and classes, each as often as the counted repetitions around it say."""
MAX_CHOICES: Final = 40
"""Places where a match may go two ways (`? * + {1,2} |`), each as often as the counted repetitions around it say."""
MAX_PRODUCT: Final = 4000
"""Size times choices: what a step of matching may cost, for each token of the vocabulary."""

_COUNTED: Final = re.compile(r"\{([0-9]{0,9})(?:(,)([0-9]{0,9}))?\}")

Size = tuple[int, int]


def fault_of(pattern: str) -> str | None:
    """Why no grammar should be made of `pattern`, in words with the limit; None where there is no reason."""
    if len(pattern) > MAX_LENGTH:
        return f"pattern may have {MAX_LENGTH} characters, not {len(pattern)}"
    outer: list[tuple[Size, Size]] = []
    done: Size = (0, 0)  # (size, choices) of this group so far, without `last`
    last: Size = (0, 0)  # of the part that a repetition would repeat
    at = 0
    while at < len(pattern):
        step, char = 1, pattern[at]
        if char == "(":
            outer.append((done, last))
            done = last = (0, 0)
            step = 2 if pattern[at + 1 : at + 2] == "?" else 1  # (?: and its like: no choice
        elif char == ")":
            if not outer:
                return "pattern closes a group that it never opened"
            group = _sum(done, last)
            before, part = outer.pop()
            done, last = _sum(before, part), group
        elif char == "|":
            done, last = _sum(_sum(done, last), (0, 1)), (0, 0)
        elif char in "?*+":
            last = _sum(last, (0, 1))
        elif char == "{":
            counted = _COUNTED.match(pattern, at)
            if counted is None or not (counted[1] or counted[3]):
                return r"pattern has a { that is no repetition like {2} or {2,5}; a literal one is \{"
            low = int(counted[1] or 0)
            high = int(counted[3]) if counted[3] else low
            if counted[3] and low > high:
                return f"pattern repeats {counted[0]}: {low} is larger than {high}"
            many = max(high, 1)
            last = (last[0] * many, last[1] * many + (counted[2] is not None))
            step = counted.end() - at
        else:
            step = _atom(pattern, at)
            done, last = _sum(done, last), (1, 0)
        size, choices = _sum(done, last)
        if size > MAX_SIZE:
            return f"pattern's repetitions multiply to more than {MAX_SIZE} characters"
        if choices > MAX_CHOICES:
            return f"pattern's repetitions multiply to more than {MAX_CHOICES} choices (? * + | and ranges)"
        if size * choices > MAX_PRODUCT:
            return f"pattern's characters ({size}) times its choices ({choices}) are more than {MAX_PRODUCT}"
        at += step
    return "pattern leaves a group open" if outer else None


def _sum(one: Size, other: Size) -> Size:
    return one[0] + other[0], one[1] + other[1]


def _atom(pattern: str, at: int) -> int:
    """Length of the character, escape or class that begins at `at`."""
    if pattern[at] == "\\":
        return 2
    if pattern[at] != "[":
        return 1
    end = at + 1
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1 - at
