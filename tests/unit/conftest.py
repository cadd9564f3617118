"""For all unit tests."""

from __future__ import annotations

# Hypothesis imports it in the middle of a test, and pytest compiles it then. Seen once: another thread compiled at the
# same moment, and CPython 3.11 called its own count of the parser's depth wrong (SystemError: AST constructor recursion
# depth mismatch).
import hypothesis.internal.conjecture.optimiser  # noqa: F401
