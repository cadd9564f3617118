"""The float64 reference is gguf-py's dequantisation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from service.engines.vllm.kernels import reference as ref


@pytest.mark.parametrize("ggml_type", list(ref.BLOCK), ids=list(ref.NAMES.values()))
def test_equals_gguf_py_on_random_bytes(ggml_type: int) -> None:
    raw = np.random.default_rng(ggml_type).integers(0, 256, (64, 6 * ref.BLOCK[ggml_type][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(ggml_type))
    got = ref.dequantize(torch.from_numpy(raw), ggml_type).float().numpy()
    finite = np.isfinite(want)
    assert finite.mean() > 0.8
    # as integers: -0.0 is not 0.0
    assert np.array_equal(want[finite].view(np.int32), got[finite].view(np.int32))


def test_block_sizes_are_ggufs() -> None:
    assert {t: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(t)] for t in ref.BLOCK} == ref.BLOCK
