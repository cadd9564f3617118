"""Tensors of a model file as the planner sees them: name, shape, type -> exact bytes, role, who reads it.

Bytes are those of ggml's block formats (checked against gguf-py in the tests). A role says three things that decide
what one GPU reads in a decode step: whether tensor parallelism splits the tensor or every rank holds it whole, whether
a step reads all of it, only the experts its tokens chose, or one row per token, and which kernels run it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Literal

from service.errors import UserError

Kind = Literal["moe", "linear", "bf16", "lm_head", "embedding", "small"]
Read = Literal["all", "experts", "rows", "draft", "never"]

# ggml type -> (elements in a block, bytes of a block)
TYPE_BLOCKS: dict[str, tuple[int, int]] = {
    "F64": (1, 8), "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "I8": (1, 1), "I16": (1, 2), "I32": (1, 4),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36), "FP8": (1, 1),
}  # fmt: skip
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})


def type_bytes(kind: str, elements: int) -> int:
    """Exact bytes of `elements` weights of ggml type `kind`. Raises UserError for a type nobody knows."""
    block = TYPE_BLOCKS.get(kind.upper())
    if block is None:
        raise UserError(f"unknown tensor type {kind!r}; known: {', '.join(sorted(TYPE_BLOCKS))}")
    return -(-elements // block[0]) * block[1]


@dataclass(frozen=True, slots=True)
class Role:
    """What a tensor is for. `split`: divided by TP. `dequantised`: vLLM keeps it in bf16 whatever the file says."""

    name: str
    kind: Kind
    split: bool
    read: Read = "all"
    dequantised: bool = False
    sparse_only: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. `shape` in any order (only the product counts), `type` a ggml type name."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return type_bytes(self.type, self.elements)

    @property
    def block(self) -> int | None:
        """Index of the layer, None outside the stack."""
        found = re.match(r"blk\.(\d+)\.", self.name)
        return int(found.group(1)) if found else None


# suffix (after "blk.N." and before ".weight") -> role. MLA: the down-projections q_a and kv_a feed every head, so each
# rank needs their whole output and vLLM replicates them (DeepseekV2MLAAttention, ReplicatedLinear); so is the router.
_ROLES: dict[str, Role] = {
    "attn_q_a": Role("q_a", "linear", split=False),
    "attn_kv_a_mqa": Role("kv_a", "linear", split=False),
    "attn_q_b": Role("q_b", "linear", split=True),
    "attn_k_b": Role("kv_b", "bf16", split=True, dequantised=True),
    "attn_v_b": Role("kv_b", "bf16", split=True, dequantised=True),
    "attn_kv_b": Role("kv_b", "bf16", split=True, dequantised=True),
    "attn_output": Role("o", "linear", split=True),
    "attn_q": Role("qkv", "linear", split=True),
    "attn_k": Role("qkv", "linear", split=True),
    "attn_v": Role("qkv", "linear", split=True),
    "attn_qkv": Role("qkv", "linear", split=True),
    "ffn_gate": Role("dense ffn", "linear", split=True),
    "ffn_up": Role("dense ffn", "linear", split=True),
    "ffn_down": Role("dense ffn", "linear", split=True),
    "ffn_gate_shexp": Role("shared expert", "linear", split=True),
    "ffn_up_shexp": Role("shared expert", "linear", split=True),
    "ffn_down_shexp": Role("shared expert", "linear", split=True),
    "ffn_gate_inp": Role("router", "bf16", split=False),
    "ffn_gate_exps": Role("experts", "moe", split=True, read="experts"),
    "ffn_up_exps": Role("experts", "moe", split=True, read="experts"),
    "ffn_down_exps": Role("experts", "moe", split=True, read="experts"),
    "ffn_gate_up_exps": Role("experts", "moe", split=True, read="experts"),
    "indexer.attn_k": Role("indexer", "bf16", split=False, dequantised=True, sparse_only=True),
    "indexer.attn_q_b": Role("indexer", "bf16", split=False, dequantised=True, sparse_only=True),
    "indexer.proj": Role("indexer", "bf16", split=False, dequantised=True, sparse_only=True),
    "nextn.eh_proj": Role("eh_proj", "bf16", split=False, dequantised=True),
}
_EMBEDDING = Role("embedding", "embedding", split=True, read="rows")
_LM_HEAD = Role("lm_head", "lm_head", split=True)
_SMALL = Role("norms and biases", "small", split=False)


def role_of(name: str) -> Role:
    """The role of a tensor by its GGUF name. An unknown matrix counts as replicated and read whole: never too fast."""
    bare = re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight")
    if bare == "token_embd":
        return _EMBEDDING
    if bare in ("output", "nextn.shared_head_head"):
        return _LM_HEAD
    if bare in _ROLES:
        return _ROLES[bare]
    if name.endswith(".bias") or "norm" in bare or bare == "rope_freqs" or bare.startswith("exp_probs_b"):
        return _SMALL
    return Role(bare, "linear", split=False)
