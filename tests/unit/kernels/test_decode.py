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


def words(plane: torch.Tensor) -> list[int]:
    """Little-endian 32-bit words of a row of bytes."""
    return np.frombuffer(plane.contiguous().numpy().tobytes(), "<u4").tolist()


@pytest.mark.parametrize("ggml_type", list(ref.BLOCK), ids=list(ref.NAMES.values()))
def test_the_ptx_gives_each_weight_to_fp16(ggml_type: int) -> None:
    torch.manual_seed(3)
    raw = random_raw(2, K, ggml_type, spread=8, device="cpu")
    w, exact = repack.repack(raw, ggml_type), ref.dequantize(raw, ggml_type)
    span = {repack.AFFINE5: 4, repack.SIGNED6: 2}.get(w.form, 1)
    decoded = np.zeros((2, w.pieces * 64))
    for row in range(2):
        for kb in range(w.pieces):
            text = decode._decode_asm(w.form, kb % span)
            scales = words(w.scales[0, kb, row])
            for group in range(8):  # four columns, and the four 32 further
                if w.form == repack.SIGNED8:
                    given = [words(w.low[0, 2 * kb + i, row])[group] for i in (0, 1)]
                else:
                    given = [words(w.low[0, kb, row])[group]]
                if w.high.shape[1]:
                    given.append(words(w.high[0, kb // span, row])[group])
                # AFFINE: both words; SIGNED6: the one of these columns
                used = [scales[group // 4]] if w.form == repack.SIGNED6 else scales
                out = ptx.run(text, given + [word for word in used for _ in range(4)], 4)
                at = kb * 64 + group * 4
                decoded[row, at : at + 4] = np.concatenate([ptx.halves(word) for word in out[:2]])
                decoded[row, at + 32 : at + 36] = np.concatenate([ptx.halves(word) for word in out[2:]])
    error = torch.from_numpy(decoded[:, :K]) * w.alpha - exact
    assert float(error.norm() / exact.norm()) < 4e-4
    assert np.isfinite(decoded).all()
    inputs = len(decode._constraints(w.form).split(",")) - 4
    assert inputs == len(given) + 4 * len(used)
