"""How tensors are cut over the ranks of a tensor-parallel group, and which cuts a file allows.

Rows of a row-split weight run along its quantisation blocks; a cut inside a block loads without an error and answers
nonsense, so every cut is checked: (columns / ranks) % block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as T

from service.gguf.glm_dsa import ARCHITECTURE
from service.gguf.header import GgufHeader, TensorInfo
from service.gguf.hf_config import Attention
from service.gguf.plan import weights_plan

Cut = Literal["columns", "rows", "whole"]

# Split along columns: each rank takes a part of the inputs and the results are summed.
_COLUMNS = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
# Split along rows: each rank makes a part of the outputs.
_ROWS = (
    *("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_q_b", "attn_k_b", "attn_v_b", "attn_kv_b"),
    *("ffn_gate", "ffn_up", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_shexp", "ffn_up_shexp"),
)
LARGEST = 64


def cut(name: str) -> Cut:
    """How vLLM splits the tensor called `name`."""
    if name in ("token_embd.weight", "output.weight"):
        return "rows"
    parts = name.split(".")
    if len(parts) != 4 or parts[3] != "weight":
        return "whole"
    return "columns" if parts[2] in _COLUMNS else "rows" if parts[2] in _ROWS else "whole"


def faults(header: GgufHeader, ranks: int, attention: Attention, *, quantised: bool) -> list[str]:
    """Why `ranks` do not fit, one sentence per kind of fault; empty when they do."""
    return [] if ranks == 1 else list(_faults(header, ranks, list(_forms(header, attention, quantised))))


def sizes_that_fit(header: GgufHeader, attention: Attention, *, quantised: bool) -> list[int]:
    """Numbers of ranks up to LARGEST that the file allows."""
    forms = list(_forms(header, attention, quantised))
    return [1] + [ranks for ranks in range(2, LARGEST + 1) if not any(_faults(header, ranks, forms))]


def _faults(header: GgufHeader, ranks: int, forms: list[tuple[TensorInfo, T]]) -> Iterator[str]:
    heads = header.integer("{arch}.attention.head_count")
    if heads % ranks:
        yield f"{heads} attention heads do not divide"
    kv_heads = header.integer("{arch}.attention.head_count_kv", heads)
    if kv_heads > 1 and max(kv_heads, ranks) % min(kv_heads, ranks):
        yield f"{kv_heads} KV heads neither divide nor repeat"
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[-1] % ranks:
        yield f"a vocabulary of {embedding.shape[-1]} does not divide"
    first: dict[str, str] = {}
    for tensor, kind in forms:
        fault = _fault(tensor, kind, ranks)
        if fault:
            role = ".".join(tensor.name.split(".")[2:]) or tensor.name
            first.setdefault(role, f"tensor {tensor.name}: {fault}")
    yield from first.values()


def _fault(tensor: TensorInfo, kind: T, ranks: int) -> str | None:
    how = cut(tensor.name)
    if how == "rows" and len(tensor.shape) > 1 and tensor.shape[1] % ranks and tensor.name.startswith("blk."):
        # k_b and v_b are cut by heads, which are checked above.
        return None if "_b." in tensor.name else f"{tensor.shape[1]} rows do not divide"
    if how != "columns":
        return None
    if tensor.columns % ranks:
        return f"{tensor.columns} columns do not divide"
    block = GGML_QUANT_SIZES[kind][0]
    if tensor.columns // ranks % block:
        return f"{tensor.columns} / {ranks} columns are not whole {kind.name} blocks of {block}"
    return None


def _forms(header: GgufHeader, attention: Attention, quantised: bool) -> Iterator[tuple[TensorInfo, T]]:
    """Each tensor that is read, with the type it has in memory (F32 stands for any plain one)."""
    if not quantised or header.architecture != ARCHITECTURE:
        for tensor in header.tensors.values():
            yield tensor, (tensor.type if quantised else T.F32)
        return
    for part in ("main", "mtp"):
        plan = weights_plan(header, part, indexer=attention == "sparse", dequantise_all=False)
        for step in plan.steps:
            kind = {"dequantised": T.F32, "q8_0": T.Q8_0, "quantised": step.tensor.type}[step.form]
            yield step.tensor, kind
