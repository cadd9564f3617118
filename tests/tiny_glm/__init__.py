"""Tiny GLM-5 files for tests: real head sizes, every kind of tensor, random weights; made in a second or two.

python -m tests.tiny_glm OUT                  # the files that tests/gpu/validate_vllm.py reads
make(path, mix="ud")                          # one file
"""

from tests.tiny_glm.maker import Tiny, make, make_split
from tests.tiny_glm.mixes import MIXES

__all__ = ["MIXES", "Tiny", "make", "make_split"]
