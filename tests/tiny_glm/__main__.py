"""python -m tests.tiny_glm OUT [MIX ...]: tiny files; without mixes those for tests/gpu/validate_vllm.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tests.tiny_glm.maker import Tiny, make
from tests.tiny_glm.mixes import MIXES

SMALL = Tiny(layers=3, dense_layers=1, experts=8, experts_used=2)
# Together under 50 MB: they travel to the machine with the GPU.
FOR_GPU = (
    ("tiny-ud.gguf", "ud", Tiny()),
    ("tiny-w1_over_w3.gguf", "w1_over_w3", SMALL),
    ("tiny-misaligned.gguf", "ud", replace(SMALL, expert_ffn=256)),
)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-") or set(arguments[1:]) - set(MIXES):
        print(__doc__, f"mixes: {', '.join(MIXES)}", sep="\n")
        return 2
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    chosen = tuple((f"tiny-{mix}.gguf", mix, Tiny()) for mix in arguments[1:]) or FOR_GPU
    for name, mix, tiny in chosen:
        print(make(out / name, mix, tiny))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
