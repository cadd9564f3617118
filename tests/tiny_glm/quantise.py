"""Quantise to any ggml type with llama.cpp's own code, which xllamacpp's shared library exports.

gguf-py writes only the simple types; K and IQ types exist in C alone.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T


@cache
def _library() -> ctypes.CDLL:
    import xllamacpp

    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    pointer = ctypes.POINTER(ctypes.c_float)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        pointer,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        pointer,
    ]
    return library


def quantise(values: np.ndarray, kind: T) -> np.ndarray:
    """`values` (..., columns) as bytes (..., columns / block * size)."""
    kind = T(kind)
    values = np.ascontiguousarray(values, np.float32)
    if kind == T.F32:
        return values
    if kind == T.F16:
        return values.astype(np.float16)
    columns = values.shape[-1]
    block, size = GGML_QUANT_SIZES[kind]
    assert columns % block == 0, (values.shape, kind.name)
    out = np.zeros((*values.shape[:-1], columns // block * size), np.uint8)
    if kind == T.BF16:
        import gguf

        return gguf.quants.quantize(values, kind)
    pointer = ctypes.POINTER(ctypes.c_float)
    # The low-bit IQ types insist on importances; all ones says "none known".
    ones = np.ones(columns, np.float32)
    needs = kind.name.startswith(("IQ1", "IQ2", "IQ3"))
    written = _library().ggml_quantize_chunk(
        int(kind),
        values.ctypes.data_as(pointer),
        out.ctypes.data,
        0,
        values.size // columns,
        columns,
        ones.ctypes.data_as(pointer) if needs else None,
    )
    assert written == out.nbytes, (written, out.nbytes, kind.name)
    return out
