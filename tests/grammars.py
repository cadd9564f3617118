"""Text that a grammar allows, drawn at random: as a model of bytes with no taste of its own would write it."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

END = 256
CLOSING = b'"]}'


class _Bytes:
    """A tokenizer whose tokens are the 256 bytes and an end."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id = END, None
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"\xff</s>"]
        self.special_token_ids = [END]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


_TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


def drawn(schema: dict[str, Any], seed: int, most: int = 400) -> str | None:
    """One text of the grammar that both engines' library makes of `schema`; None where it grew beyond `most` bytes.
    Raises ValueError with the library's words where it makes none."""
    matcher = LLMatcher(_TOKENIZER, grammar_from("json_schema", json.dumps(schema)))
    rng, text = random.Random(seed), b""
    while len(text) < most:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        byte = _choose([int(each) for each in allowed], rng, len(text))
        if byte == END:
            return text.decode()
        assert matcher.consume_token(byte), matcher.get_error()
        text += bytes([byte])
    return None


def _choose(allowed: list[int], rng: random.Random, length: int) -> int:
    """Any of them, but not so that the text never ends."""
    if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
        return END
    bytes_ = [byte for byte in allowed if byte != END]
    closing = [byte for byte in bytes_ if byte in CLOSING]
    if closing and rng.random() < 0.15 + length / 400:
        return rng.choice(closing)
    printable = [byte for byte in bytes_ if 32 < byte < 127]
    return rng.choice(printable if printable and rng.random() < 0.95 else bytes_)
