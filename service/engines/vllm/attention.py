"""Dense or sparse attention for GLM-5, and what the choice means, in words."""

from __future__ import annotations

from typing import Literal

from service.errors import UserError
from service.gguf.glm_dsa import ARCHITECTURE, GlmDsa
from service.gguf.header import GgufHeader
from service.gguf.hf_config import Attention

AttentionSetting = Literal["auto", "dense", "sparse"]


def choose_attention(
    header: GgufHeader, setting: AttentionSetting, context_tokens: int | None, *, on_cpu: bool
) -> Attention:
    """`auto`: dense where that is exact (context within the indexer's top-k) or all there is (CPUs), else sparse.
    Raises UserError for sparse on a CPU. Architectures without an indexer are dense."""
    if header.architecture != ARCHITECTURE:
        return "dense"
    if setting == "sparse" and on_cpu:
        raise UserError("sparse attention needs a GPU: vLLM has no CPU kernel for it; set attention: dense")
    if setting != "auto":
        return setting
    top_k = GlmDsa.from_header(header).index_topk
    return "dense" if on_cpu or (context_tokens is not None and context_tokens <= top_k) else "sparse"


def exactness(header: GgufHeader, attention: Attention, context_tokens: int) -> str | None:
    """A sentence for the operator where the served model differs from the trained one, else None."""
    if header.architecture != ARCHITECTURE or attention == "sparse":
        return None
    top_k = GlmDsa.from_header(header).index_topk
    if context_tokens <= top_k:
        return None
    return (
        f"dense attention is exact up to {top_k} tokens; beyond that every token attends to all before it, "
        f"where GLM-5 was trained to choose {top_k} of them (context is {context_tokens})"
    )
