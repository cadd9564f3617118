"""Just enough of PTX to run the decoding of weights where there is no GPU: straight lines of 32-bit words."""

from __future__ import annotations

import re

import numpy as np


def halves(word: int) -> np.ndarray:
    """The two fp16 of a word, low first."""
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(np.float16)


def word_of(pair: np.ndarray) -> int:
    low, high = (int(v) for v in pair.astype(np.float16).view(np.uint16))
    return low | high << 16


def permute(low: int, high: int, selector: int) -> int:
    """prmt.b32, default mode: four bytes chosen among eight; a selector's top bit repeats the byte's sign instead."""
    data = (low | high << 32).to_bytes(8, "little")
    chosen = []
    for i in range(4):
        pick = selector >> (4 * i) & 15
        byte = data[pick & 7]
        chosen.append((0xFF if byte & 0x80 else 0) if pick & 8 else byte)
    return int.from_bytes(bytes(chosen), "little")


def run(text: str, inputs: list[int], outputs: int) -> list[int]:
    """Run `text`, an inline-assembly block whose operands are $0.. (first the outputs). Raises KeyError for what it
    does not know: an operation, or a register that nothing has written."""
    registers: dict[str, int] = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> int:
        return int(name, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", name) else registers[name]

    fused = {"fma.rn.f16x2": lambda a, b, c: a * b + c, "mul.rn.f16x2": lambda a, b: a * b}
    plain = {
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "shr.u32": lambda a, b: a >> b,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "mov.b32": lambda a: a,
        "prmt.b32": permute,
    }
    for line in text.strip("{} ").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *sources = re.findall(r"\{[^}]*\}|[$\w]+", rest)
        if target.startswith("{"):  # a word into its halves
            for half, name in enumerate(target.strip("{}").split(",")):
                registers[name] = value(sources[0]) >> (16 * half) & 0xFFFF
        elif sources[0].startswith("{"):  # halves into a word
            low, high = (value(name) for name in sources[0].strip("{}").split(","))
            registers[target] = low | high << 16
        elif operation in fused:  # exact in float64, rounded once
            wide = [halves(value(name)).astype(np.float64) for name in sources]
            registers[target] = word_of(fused[operation](*wide))
        else:
            registers[target] = plain[operation](*(value(name) for name in sources))
    return [registers[f"${i}"] for i in range(outputs)]
