"""Memory of one GPU: weights as they lie there, and KV for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as T

from service.gguf.glm_dsa import ARCHITECTURE, GlmDsa
from service.gguf.header import GgufHeader
from service.gguf.hf_config import Attention
from service.gguf.plan import weights_plan
from service.gguf.split import cut

_PLAIN_BYTES = 2
# The indexer's cache holds a key of `index_dim` bytes (fp8) and a scale of 4 bytes for each 128 of them.
_INDEX_SCALE = (128, 4)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. KV in bf16; activations and CUDA graphs come on top (vLLM measures them at start)."""

    weights: int
    kv_per_token: int


def per_gpu(header: GgufHeader, attention: Attention, mtp: bool, ranks: int, *, quantised: bool) -> Need:
    """What each of `ranks` holds. Raises GgufError."""
    if header.architecture != ARCHITECTURE:
        return _others(header, ranks, quantised)
    shape = GlmDsa.from_header(header)
    parts: tuple[Literal["main", "mtp"], ...] = ("main", "mtp") if mtp else ("main",)
    weights = 0
    for part in parts:
        plan = weights_plan(header, part, indexer=attention == "sparse", dequantise_all=not quantised)
        for step in plan.steps:
            for tensor in (step.tensor, step.partner):
                if tensor is not None:
                    size = _size(tensor.elements, step.form, tensor.bytes)
                    weights += size if cut(tensor.name) == "whole" else size // ranks
    layers = shape.layers + (shape.mtp_layers if mtp else 0)
    kv = layers * (shape.kv_lora + shape.qk_rope) * _PLAIN_BYTES
    if attention == "sparse":
        block, scale = _INDEX_SCALE
        indexed = sum(shape.index_layers) + (shape.mtp_layers if mtp else 0)
        kv += indexed * (shape.index_dim + -(-shape.index_dim // block) * scale)
    return Need(weights, kv)


def _size(elements: int, form: str, size: int) -> int:
    if form == "quantised":
        return size
    if form == "q8_0":
        block, block_bytes = GGML_QUANT_SIZES[T.Q8_0]
        return elements // block * block_bytes
    return elements * _PLAIN_BYTES


def _others(header: GgufHeader, ranks: int, quantised: bool) -> Need:
    weights = 0
    for tensor in header.tensors.values():
        size = tensor.bytes if quantised else tensor.elements * _PLAIN_BYTES
        weights += size if cut(tensor.name) == "whole" else size // ranks
    layers = header.integer("{arch}.block_count")
    heads = header.integer("{arch}.attention.head_count")
    width = header.integer("{arch}.attention.key_length", header.integer("{arch}.embedding_length") // max(1, heads))
    kv_heads = header.integer_per_layer("{arch}.attention.head_count_kv", min(layers, 1024), heads)
    kv = sum(2 * max(1, heads_here // ranks) * width * _PLAIN_BYTES for heads_here in kv_heads)
    return Need(weights, kv)
