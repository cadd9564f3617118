"""GLM-5's tensors with their real shapes, for planning without the 402 GiB file.

Dimensions: config.json of zai-org/GLM-5 (hidden 6144, 78 layers of which 3 dense, 256 experts top-8 of 2048, MLA with
q_lora 2048 and kv_lora 512, vocabulary 154880, one MTP layer), and 32 indexer heads of 128.

Types: a published UD-Q4_K_XL header was not at hand. The mix below follows what is known of such files (experts Q4_K,
the down projections of the first layers finer, shared expert and lm_head Q6_K, q_a Q4_K beside kv_a Q8_0, k_b and v_b
Q8_0) and is closed by the two published sums: 402 GiB of file, and 4.4 GB read per GPU and token at TP=8. (402e9 bytes
is impossible: 754e9 weights at Q4_K's 4.5 bits are 424e9.) The same builder with another published mix must give that
file's published size; a test checks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from service.planning.tensors import Tensor

HIDDEN, LAYERS, DENSE_LAYERS, MTP_LAYERS = 6144, 78, 3, 1
HEADS, Q_LORA, KV_LORA, QK_NOPE, QK_ROPE, V_HEAD = 64, 2048, 512, 192, 64, 256
FFN, EXPERT_FFN, EXPERTS, TOP_K, VOCAB = 12288, 2048, 256, 8, 154880
INDEX_HEADS, INDEX_HEAD, INDEX_TOP_K, CONTEXT = 32, 128, 2048, 202752

METADATA: dict[str, object] = {
    "general.architecture": "glm-dsa",
    "general.name": "GLM-5 (synthetic header)",
    "glm-dsa.block_count": LAYERS + MTP_LAYERS,
    "glm-dsa.nextn_predict_layers": MTP_LAYERS,
    "glm-dsa.leading_dense_block_count": DENSE_LAYERS,
    "glm-dsa.embedding_length": HIDDEN,
    "glm-dsa.context_length": CONTEXT,
    "glm-dsa.vocab_size": VOCAB,
    "glm-dsa.attention.head_count": HEADS,
    "glm-dsa.attention.head_count_kv": 1,
    "glm-dsa.attention.q_lora_rank": Q_LORA,
    "glm-dsa.attention.kv_lora_rank": KV_LORA,
    "glm-dsa.attention.key_length": KV_LORA + QK_ROPE,
    "glm-dsa.attention.value_length": KV_LORA,
    "glm-dsa.attention.key_length_mla": QK_NOPE + QK_ROPE,
    "glm-dsa.attention.value_length_mla": V_HEAD,
    "glm-dsa.attention.indexer.head_count": INDEX_HEADS,
    "glm-dsa.attention.indexer.key_length": INDEX_HEAD,
    "glm-dsa.attention.indexer.top_k": INDEX_TOP_K,
    "glm-dsa.rope.dimension_count": QK_ROPE,
    "glm-dsa.expert_count": EXPERTS,
    "glm-dsa.expert_used_count": TOP_K,
}


@dataclass(frozen=True, slots=True)
class Mix:
    """Tensor types of one published file. `fine_down`: layers whose ffn_down_exps is `fine_down_type` instead."""

    name: str
    default: str
    types: Mapping[str, str]
    fine_down: frozenset[int] = frozenset()
    fine_down_type: str = "Q5_K"

    def of(self, bare: str, layer: int | None) -> str:
        if bare == "ffn_down_exps" and layer in self.fine_down:
            return self.fine_down_type
        return self.types.get(bare, self.default)


PLAIN = dict.fromkeys(("ffn_gate_inp", "exp_probs_b.bias", "norm"), "F32")
UD_Q4_K_XL = Mix(
    "Q4_K_XL",
    "Q4_K",
    PLAIN
    | {
        "attn_kv_a_mqa": "Q8_0",
        "attn_k_b": "Q8_0",
        "attn_v_b": "Q8_0",
        "ffn_gate_shexp": "Q6_K",
        "ffn_up_shexp": "Q6_K",
        "ffn_down_shexp": "Q6_K",
        "ffn_down": "Q6_K",
        "indexer.attn_k": "Q8_0",
        "indexer.attn_q_b": "Q8_0",
        "indexer.proj": "BF16",
        "nextn.eh_proj": "Q8_0",
        "output": "Q6_K",
    },
    fine_down=frozenset(range(3, 16)),
)
# AesSedai/GLM-5.1-GGUF, README of 2026-05-02: "Q4_K_M 432.80 GiB, Q8_0 / Q4_K / Q4_K / Q5_K" (rest / up / gate / down)
MOE_Q4_K_M = Mix("Q4_K_M", "Q8_0", PLAIN | {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q5_K"})
# NVFP4 checkpoints of GLM-5 quantise the experts only; the rest stays bf16 (the published throughput rows use those).
NVFP4 = Mix(
    "NVFP4", "BF16", PLAIN | {f"ffn_{part}_exps": "NVFP4" for part in ("gate", "up", "down")}
)  # fmt: skip
MIXES: dict[str, Mix] = {"glm-5": UD_Q4_K_XL, "glm-5-q4_k_m": MOE_Q4_K_M, "glm-5-nvfp4": NVFP4}


def some_layers(mix: Mix, first: int, layers: int) -> tuple[dict[str, Any], list[Tensor]]:
    """(metadata, tensors) of a model of `layers` of these layers from `first` on, embedding and head included, without
    MTP and indexer: what fits on one GPU, for measuring."""
    kept = [
        replace(t, name=t.name.replace(f"blk.{t.block}.", f"blk.{t.block - first}.", 1)) if t.block is not None else t
        for t in tensors(mix)
        if (t.block is None or first <= t.block < first + layers) and "indexer" not in t.name
    ]
    return METADATA | {"glm-dsa.block_count": layers, "glm-dsa.nextn_predict_layers": 0}, kept


def tensors(mix: Mix) -> Iterator[Tensor]:
    """Every tensor of the file, MTP layer included, shapes in ggml's order (fastest first)."""

    def make(bare: str, shape: tuple[int, ...], layer: int | None = None) -> Tensor:
        key = "norm" if "norm" in bare else bare
        suffix = "" if bare.endswith(".bias") else ".weight"
        return Tensor(("" if layer is None else f"blk.{layer}.") + bare + suffix, shape, mix.of(key, layer))

    yield make("token_embd", (HIDDEN, VOCAB))
    yield make("output_norm", (HIDDEN,))
    yield make("output", (HIDDEN, VOCAB))
    for i in range(LAYERS + MTP_LAYERS):
        yield make("attn_norm", (HIDDEN,), i)
        yield make("attn_q_a", (HIDDEN, Q_LORA), i)
        yield make("attn_q_a_norm", (Q_LORA,), i)
        yield make("attn_q_b", (Q_LORA, HEADS * (QK_NOPE + QK_ROPE)), i)
        yield make("attn_kv_a_mqa", (HIDDEN, KV_LORA + QK_ROPE), i)
        yield make("attn_kv_a_norm", (KV_LORA,), i)
        yield make("attn_k_b", (QK_NOPE, KV_LORA, HEADS), i)
        yield make("attn_v_b", (KV_LORA, V_HEAD, HEADS), i)
        yield make("attn_output", (HEADS * V_HEAD, HIDDEN), i)
        yield make("indexer.attn_k", (HIDDEN, INDEX_HEAD), i)
        yield make("indexer.k_norm", (INDEX_HEAD,), i)
        yield make("indexer.attn_q_b", (Q_LORA, INDEX_HEADS * INDEX_HEAD), i)
        yield make("indexer.proj", (HIDDEN, INDEX_HEADS), i)
        yield make("ffn_norm", (HIDDEN,), i)
        if i < DENSE_LAYERS:
            yield make("ffn_gate", (HIDDEN, FFN), i)
            yield make("ffn_up", (HIDDEN, FFN), i)
            yield make("ffn_down", (FFN, HIDDEN), i)
        else:
            yield make("ffn_gate_inp", (HIDDEN, EXPERTS), i)
            yield make("exp_probs_b.bias", (EXPERTS,), i)
            for part in ("gate", "up"):
                yield make(f"ffn_{part}_exps", (HIDDEN, EXPERT_FFN, EXPERTS), i)
                yield make(f"ffn_{part}_shexp", (HIDDEN, EXPERT_FFN), i)
            yield make("ffn_down_exps", (EXPERT_FFN, HIDDEN, EXPERTS), i)
            yield make("ffn_down_shexp", (EXPERT_FFN, HIDDEN), i)
        if i >= LAYERS:
            yield make("nextn.eh_proj", (2 * HIDDEN, HIDDEN), i)
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                yield make(f"nextn.{norm}", (HIDDEN,), i)
