"""x @ W^T against float64: every type, split K, ragged shapes, tokens out of fp16's range, the prefill path."""

from __future__ import annotations

import pytest
import torch

from service.engines.vllm.kernels import reference as ref
from service.engines.vllm.kernels.choose import LinearTile
from service.engines.vllm.kernels.linear import COUNTERS, linear
from service.engines.vllm.kernels.repack import repack
from tests.unit.kernels.interpreted.cases import raw_blocks, relative

EXACT = 6e-4
"""Outputs are float32 here (the interpreter truncates to bf16 instead of rounding); the rest is fp16 steps."""


def run(x: torch.Tensor, raw: torch.Tensor, ggml_type: int, tile: LinearTile | None) -> tuple[float, torch.Tensor]:
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    got = linear(x, repack(raw, ggml_type), counters, tile)
    assert not bool(counters.any()), "a kernel that lends counters must leave them zero"
    return relative(got, x.double() @ ref.dequantize(raw, ggml_type).T), got


def bf16_tokens(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k).bfloat16().float()


@pytest.mark.parametrize("ggml_type", list(ref.BLOCK), ids=list(ref.NAMES.values()))
def test_every_type(ggml_type: int) -> None:
    error, _ = run(bf16_tokens(3, 512), raw_blocks(72, 512, ggml_type), ggml_type, LinearTile(64, 8, 2, 2, 3))
    assert error < EXACT


@pytest.mark.parametrize(("m", "k", "split"), [(1, 160, 1), (11, 192, 3), (17, 64, 1)])
def test_ragged_shapes(m: int, k: int, split: int) -> None:
    error, _ = run(bf16_tokens(m, k), raw_blocks(40, k, ref.Q4_1), ref.Q4_1, LinearTile(64, 16, split, 2, 3))
    assert error < EXACT


def test_no_tokens() -> None:
    assert run(torch.zeros(0, 256), raw_blocks(64, 256, ref.Q4_K), ref.Q4_K, LinearTile(64, 8, 1, 2, 3))[1].shape == (
        0,
        64,
    )


@pytest.mark.parametrize("size", [1e5, 3e38 / 1e4, 1e-6, 1e-7])
@pytest.mark.parametrize("tile", [LinearTile(64, 8, 2, 2, 3), None], ids=["kernel", "prefill"])
def test_tokens_beyond_fp16_beside_usual_ones(size: float, tile: LinearTile | None) -> None:
    x = bf16_tokens(4, 512)
    x[1] *= size
    x[2] = 0
    raw = raw_blocks(64, 512, ref.Q4_K)
    _, got = run(x, raw, ref.Q4_K, tile)
    want = x.double() @ ref.dequantize(raw, ref.Q4_K).T
    for row in (0, 1, 3):
        assert relative(got[row], want[row]) < EXACT, row
    assert not bool(got[2].any())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_token_that_is_not_finite_spoils_only_itself(value: float) -> None:
    x = bf16_tokens(4, 256)
    x[2, 5] = value
    raw = raw_blocks(64, 256, ref.Q5_K)
    _, got = run(x, raw, ref.Q5_K, LinearTile(64, 8, 1, 2, 3))
    keep = [0, 1, 3]
    assert not bool(got[2].isfinite().any())
    assert relative(got[keep], x[keep].double() @ ref.dequantize(raw, ref.Q5_K).T) < EXACT


def test_results_repeat_bit_for_bit() -> None:
    x, raw = bf16_tokens(2, 512), raw_blocks(64, 512, ref.Q6_K)
    tile = LinearTile(64, 8, 2, 2, 3)
    assert torch.equal(run(x, raw, ref.Q6_K, tile)[1], run(x, raw, ref.Q6_K, tile)[1])
