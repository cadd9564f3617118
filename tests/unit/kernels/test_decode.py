"""The PTX that GPUs run, word by word in a small interpreter, against GGUF's own values of the same blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from service.engines.vllm.kernels import decode, repack
from service.engines.vllm.kernels import reference as ref
from service.engines.vllm.kernels.measure import random_raw
from tests.unit.kernels import ptx

K = 512


def row_words(plane: torch.Tensor) -> np.ndarray:
    """[rows, bytes] -> the 16-bit words of each row: two neighbouring bytes."""
    return plane.contiguous().numpy().view("<u2")


@pytest.mark.parametrize("rows", [1, 2], ids=["four of a row", "two of two rows"])
@pytest.mark.parametrize("ggml_type", list(ref.BLOCK), ids=list(ref.NAMES.values()))
def test_the_ptx_gives_each_weight_to_fp16(ggml_type: int, rows: int) -> None:
    """A call's four bytes are four of a row or two each of two rows, as the tensor core's instruction has it."""
    torch.manual_seed(3)
    raw = random_raw(2, K, ggml_type, spread=8, device="cpu")
    w, exact = repack.repack(raw, ggml_type), ref.dequantize(raw, ggml_type)
    span = {repack.AFFINE5: 4, repack.SIGNED6: 2}.get(w.form, 1)
    decoded = np.zeros((2, w.pieces * 64))
    for kb in range(w.pieces):
        text = decode._decode_asm(w.form, kb % span)
        planes = [w.low[0, 2 * kb + i] for i in (0, 1)] if w.form == repack.SIGNED8 else [w.low[0, kb]]
        planes += [w.high[0, kb // span]] if w.high.shape[1] else []
        scales = w.scales[0, kb, :2].numpy().view("<u4").reshape(2, -1)
        # where the two pairs of a call are: (row, column of the first)
        places = [(row, 2 * i) for row in range(2) for i in range(16)]
        calls = (
            zip(places[0::2], places[1::2], strict=True) if rows == 1 else zip(places[:16], places[16:], strict=True)
        )
        for pairs in calls:
            given = [
                int(halves[pairs[0][0], pairs[0][1] // 2]) | int(halves[pairs[1][0], pairs[1][1] // 2]) << 16
                for halves in map(row_words, planes)
            ]
            # AFFINE: both words of a row; SIGNED6: the one of these columns
            used = [
                [int(scales[row, column // 16])] if w.form == repack.SIGNED6 else [int(s) for s in scales[row]]
                for row, column in pairs
            ]
            each = [word for both in zip(*used, strict=True) for word in (both[0], both[0], both[1], both[1])]
            out = ptx.run(text, given + each, 4)
            for (row, column), lo, hi in zip(pairs, out[:2], out[2:], strict=True):
                at = kb * 64 + column
                decoded[row, at : at + 2], decoded[row, at + 32 : at + 34] = ptx.halves(lo), ptx.halves(hi)
    error = torch.from_numpy(decoded[:, :K]) * w.alpha - exact
    assert float(error.norm() / exact.norm()) < 4e-4
    assert len(decode._constraints(w.form).split(",")) - 4 == len(given) + len(each)
