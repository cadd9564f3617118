"""These tests run the kernels in Triton's interpreter, on small shapes. It must be chosen before Triton is imported, so
they run in a process of their own: ../test_interpreted.py starts it, or TRITON_INTERPRET=1 pytest tests/unit/kernels.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(1234)
