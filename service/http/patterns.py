"""The `pattern` of a JSON schema: read, never compiled or run. How large a grammar it makes, and whether all its parts
mean the same to ECMA-262, which JSON Schema names, and to the library that makes the grammar."""

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

_COUNTED: Final = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{0,9}))?\}")
_ESCAPE: Final = re.compile(r"\\(?:[dDwWsStnrfv]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[!-/:-@\[-`{-~])")

Size = tuple[int, int]


def fault_of(pattern: str) -> str | None:
    """Why no grammar should be made of `pattern`, in words with the limit; None where there is no reason."""
    if len(pattern) > MAX_LENGTH:
        return f"pattern may have {MAX_LENGTH} characters, not {len(pattern)}"
    outer: list[tuple[Size, Size]] = []
    done: Size = (0, 0)  # (size, choices) of this group so far, without `last`
    last: Size = (0, 0)  # of the part that a repetition would repeat
    at = repeated = 0  # repeated: repetition signs just before
    while at < len(pattern):
        step, char = 1, pattern[at]
        if char == "(":
            outer.append((done, last))
            done = last = (0, 0)
            if pattern[at + 1 : at + 2] == "?":
                if pattern[at + 2 : at + 3] != ":":
                    return (
                        f"pattern: of groups that begin with (?, only (?: can be enforced, not {pattern[at : at + 4]}"
                    )
                step = 3
        elif char == ")":
            if not outer:
                return "pattern closes a group that it never opened"
            group = _sum(done, last)
            before, part = outer.pop()
            done, last = _sum(before, part), group
        elif char == "|":
            done, last = _sum(_sum(done, last), (0, 1)), (0, 0)
        elif char in "?*+":
            if repeated and not (char == "?" and repeated == 1):
                return rf"pattern repeats a repetition ({pattern[at - 1 : at + 1]}); a literal {char} is \{char}"
            last = _sum(last, (0, 1))
        elif char == "{":
            counted = _COUNTED.match(pattern, at)
            if counted is None:
                return r"pattern has a { that is no repetition like {2} or {2,5}; a literal one is \{"
            if repeated:
                return f"pattern repeats a repetition ({counted[0]})"
            low = int(counted[1])
            high = int(counted[3]) if counted[3] else low
            if counted[3] and low > high:
                return f"pattern repeats {counted[0]}: {low} is larger than {high}"
            many = max(high, 1)
            last = (last[0] * many, last[1] * many + (counted[2] is not None))
            step = counted.end() - at
        elif char == "^" and pattern[at - 1 : at] not in ("", "(", "|", ":"):
            return r"pattern: ^ can only stand where a pattern or group begins; a literal one is \^"
        elif char == "$" and pattern[at + 1 : at + 2] not in ("", ")", "|"):
            return r"pattern: $ can only stand where a pattern or group ends; a literal one is \$"
        else:
            step = _atom(pattern, at)
            fault = _foreign(pattern[at : at + step])
            if fault is not None:
                return fault
            done, last = _sum(done, last), (1, 0)
        size, choices = _sum(done, last)
        if size > MAX_SIZE:
            return f"pattern's repetitions multiply to more than {MAX_SIZE} characters"
        if choices > MAX_CHOICES:
            return f"pattern's repetitions multiply to more than {MAX_CHOICES} choices (? * + | and ranges)"
        if size * choices > MAX_PRODUCT:
            return f"pattern's characters ({size}) times its choices ({choices}) are more than {MAX_PRODUCT}"
        repeated = repeated + 1 if char in "?*+{" else 0
        at += step
    return "pattern leaves a group open" if outer else None


def _sum(one: Size, other: Size) -> Size:
    return one[0] + other[0], one[1] + other[1]


def _atom(pattern: str, at: int) -> int:
    """Length of the character, escape or class that begins at `at`."""
    if pattern[at] == "\\":
        escape = _ESCAPE.match(pattern, at)
        return 2 if escape is None else len(escape[0])
    if pattern[at] != "[":
        return 1
    end = at + 1
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1 - at


def _foreign(atom: str) -> str | None:
    """What in a character, escape or class cannot be enforced, or would be read differently."""
    if atom[0] != "[":
        return None if atom[0] != "\\" or _ESCAPE.fullmatch(atom) else f"pattern: {atom} cannot be enforced"
    if not atom.endswith("]") or len(atom) < 3 or atom == "[^]":
        return r"pattern has a [ without a class; a literal [ is \[, and ] as a member is \]"
    inside = atom[2:-1] if atom[1] == "^" else atom[1:-1]
    at = 0
    while at < len(inside):
        if inside[at] == "\\":
            escape = _ESCAPE.match(inside, at)
            if escape is None:
                return f"pattern: {inside[at : at + 2]} in a class cannot be enforced"
            at = escape.end()
            continue
        if inside[at] == "[" or inside[at : at + 2] in ("&&", "--", "~~"):
            two = inside[at : at + 2]
            return rf"pattern: {two} in a class is read differently by different libraries; a literal one is \{two}"
        at += 1
    return None
