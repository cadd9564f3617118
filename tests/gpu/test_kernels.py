"""The float64 checks of kernels_check.py as one test; skipped where there is no GPU."""

from __future__ import annotations

import pytest


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_type_shape_and_number_of_tokens() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    from tests.gpu import kernels_check

    assert kernels_check.main() == 0
