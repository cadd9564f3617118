"""These tests run the kernels in Triton's interpreter, on small shapes.

Whether a kernel is interpreted is decided when its module is imported, so that happens here; the switch is put back,
for it is an environment variable that vLLM's tests in the same session must not see.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import triton

triton.knobs.runtime.interpret = True
try:
    from service.engines.vllm.kernels import linear, moe  # noqa: F401
finally:
    triton.knobs.runtime.interpret = False


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    triton.knobs.runtime.interpret = True
    yield
    triton.knobs.runtime.interpret = False


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(1234)
