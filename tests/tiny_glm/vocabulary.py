"""A byte-level vocabulary of 384 tokens with GLM's special ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

SIZE = 384
SPECIAL = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
SPECIAL += ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"]
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġt", "he"), ("a", "n"), ("i", "n"), ("Ġ", "a"), ("o", "n"))
MERGES += (("e", "r"), ("Ġ", "c"), ("Ġa", "n"), ("in", "g"))
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    tokens: list[str]
    types: list[int]
    merges: list[str]
    printable: np.ndarray
    """Tokens that are whole characters on their own: bool (size,)."""

    @property
    def size(self) -> int:
        return len(self.tokens)

    def id(self, token: str) -> int:
        return self.tokens.index(token)


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


@cache
def vocabulary() -> Vocabulary:
    letters = byte_letters()
    tokens = [letters[b] for b in range(256)] + [a + b for a, b in MERGES]
    words = SIZE - len(SPECIAL) - 4
    tokens += [f"tok{i}" for i in range(len(tokens), words)]
    types = [1] * words + [3] * len(SPECIAL) + [5] * 4
    tokens += SPECIAL
    tokens += [f"[PAD{i}]" for i in range(len(tokens), SIZE)]
    printable = np.array([i < 128 or 256 <= i < words for i in range(SIZE)])
    return Vocabulary(tokens, types, [f"{a} {b}" for a, b in MERGES], printable)
