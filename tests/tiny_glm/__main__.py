"""python -m tests.tiny_glm OUT [MIX ...]: tiny files; without mixes those for tests/gpu/validate_vllm.py."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.tiny_glm.maker import Tiny, make
from tests.tiny_glm.mixes import MIXES

FOR_GPU = ("ud", "w1_over_w3")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-") or set(arguments[1:]) - set(MIXES):
        print(__doc__, f"mixes: {', '.join(MIXES)}", sep="\n")
        return 2
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    for mix in arguments[1:] or FOR_GPU:
        print(make(out / f"tiny-{mix}.gguf", mix))
    if not arguments[1:]:
        print(make(out / "tiny-misaligned.gguf", "ud", Tiny(expert_ffn=256)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
