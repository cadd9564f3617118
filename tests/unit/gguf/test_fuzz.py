"""Mutated headers: each gives a header or a GgufError, quickly and in little memory.

GLM5_FUZZ sets the number of mutants (default 5,000; the full run in docs/gguf.md used 100,000).
"""

from __future__ import annotations

import io
import os
import random
import time
import tracemalloc
from pathlib import Path

from service.gguf.errors import GgufError
from service.gguf.header import parse_part
from service.gguf.wire import GgufArray
from tests.unit.gguf.build import rich

MUTANTS = int(os.environ.get("GLM5_FUZZ", "5000"))
NASTY = [0, 1, 2, 8, 9, 0x7F, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def mutate(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(max(1, len(out)))
        match rng.randrange(7):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at : at + 8] = rng.choice(NASTY).to_bytes(8, "little")
            case 2:
                out[at : at + 4] = (rng.choice(NASTY) & 0xFFFFFFFF).to_bytes(4, "little")
            case 3:
                del out[at:]
            case 4:
                del out[at : at + rng.randrange(1, 64)]
            case 5:
                start = rng.randrange(max(1, len(out)))
                out[at:at] = out[start : start + rng.randrange(1, 128)]
            case 6:
                out[at : at + 1] = bytes([out[at] ^ (1 << rng.randrange(8))]) if out else b""
        if not out:
            break
    return bytes(out)


def outcome(data: bytes) -> str:
    try:
        part = parse_part(io.BytesIO(data), len(data), Path("mutant.gguf"))
        for value in part.metadata.values():
            if isinstance(value, GgufArray):
                value.values()
    except (GgufError, ValueError) as error:
        # ValueError: a string inside an array is not UTF-8; GgufHeader.texts turns it into a GgufError.
        assert isinstance(error, GgufError) or "is not UTF-8" in str(error)
        return "refused"
    return "read"


def test_mutated_headers() -> None:
    file = rich()
    base, header_bytes = file.bytes(), len(file.header())
    rng = random.Random(20261129)
    counts = {"read": 0, "refused": 0}
    slowest = 0.0
    tracemalloc.start()
    for _ in range(MUTANTS):
        data = mutate(base[:header_bytes], rng) + base[header_bytes:]
        started = time.perf_counter()
        counts[outcome(data)] += 1
        slowest = max(slowest, time.perf_counter() - started)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{MUTANTS} mutants: {counts}, slowest {slowest * 1e3:.1f} ms, peak {peak / 1e6:.2f} MB")
    assert counts["refused"] > MUTANTS // 2
    assert counts["read"] > 0
    assert slowest < 1.0
    assert peak < 2_000_000
