"""GLM-5 (`general.architecture` = glm-dsa): its dimensions, and every tensor that a file of it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from service.gguf.errors import GgufError
from service.gguf.header import GgufHeader

ARCHITECTURE = "glm-dsa"
_LARGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class GlmDsa:
    """Numbers of the model, in elements. `layers` are the decoder's; `mtp_layers` follow them in the file.

    `index_layers[i]`: layer i has its own indexer (GLM-5.2 lets layers share the previous one's choice).
    """

    layers: int
    mtp_layers: int
    hidden: int
    heads: int
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    dense_layers: int
    dense_ffn: int
    experts: int
    experts_used: int
    expert_ffn: int
    shared_experts: int
    vocab: int
    context: int
    index_heads: int
    index_dim: int
    index_topk: int
    index_layers: tuple[bool, ...]

    @property
    def blocks(self) -> int:
        return self.layers + self.mtp_layers

    @staticmethod
    def from_header(header: GgufHeader) -> GlmDsa:
        """Raises GgufError naming the key that is missing or out of range."""
        if header.architecture != ARCHITECTURE:
            raise GgufError(header.path, "key general.architecture", f"is {header.architecture}, not {ARCHITECTURE}")

        def size(key: str, default: int | None = None, least: int = 1) -> int:
            value = header.integer("{arch}." + key, default)
            if not least <= value <= _LARGEST:
                raise GgufError(header.path, f"key {ARCHITECTURE}.{key}", f"{value} is not in {least}..{_LARGEST}")
            return value

        mtp = size("nextn_predict_layers", 0, least=0)
        blocks = size("block_count")
        if blocks > 1024 or mtp >= blocks:
            raise GgufError(header.path, f"key {ARCHITECTURE}.block_count", f"{blocks} blocks, {mtp} of them MTP")
        rope, key_mla = size("rope.dimension_count"), size("attention.key_length_mla")
        if rope >= key_mla:
            raise GgufError(header.path, f"key {ARCHITECTURE}.rope.dimension_count", f"{rope} of {key_mla} key columns")
        kv_heads = size("attention.head_count_kv", 1)
        if kv_heads != 1:
            raise GgufError(header.path, f"key {ARCHITECTURE}.attention.head_count_kv", f"{kv_heads}: MLA files have 1")
        return GlmDsa(
            layers=blocks - mtp,
            mtp_layers=mtp,
            hidden=size("embedding_length"),
            heads=size("attention.head_count"),
            q_lora=size("attention.q_lora_rank"),
            kv_lora=size("attention.kv_lora_rank"),
            qk_nope=key_mla - rope,
            qk_rope=rope,
            v_head=size("attention.value_length_mla"),
            dense_layers=size("leading_dense_block_count", 0, least=0),
            dense_ffn=size("feed_forward_length"),
            experts=size("expert_count"),
            experts_used=size("expert_used_count"),
            expert_ffn=size("expert_feed_forward_length"),
            shared_experts=size("expert_shared_count", 0, least=0),
            vocab=_vocab(header),
            context=size("context_length"),
            index_heads=size("attention.indexer.head_count"),
            index_dim=size("attention.indexer.key_length"),
            index_topk=size("attention.indexer.top_k"),
            index_layers=_index_layers(header, blocks - mtp),
        )

    def is_moe(self, block: int) -> bool:
        return block >= self.dense_layers

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """(name, shape in ggml's order, needed) of each tensor that a file may hold. Not needed: a `kv_b` in one piece,
        which stands for `k_b` and `v_b`, an output that is tied to the embedding, and MTP's own copies of either."""
        yield "token_embd.weight", (self.hidden, self.vocab), True
        yield "output_norm.weight", (self.hidden,), True
        yield "output.weight", (self.hidden, self.vocab), False
        for block in range(self.blocks):
            for name, shape, needed in self._block(block):
                yield f"blk.{block}.{name}", shape, needed

    def _block(self, block: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        h, heads = self.hidden, self.heads
        yield "attn_norm.weight", (h,), True
        yield "ffn_norm.weight", (h,), True
        yield "attn_q_a.weight", (h, self.q_lora), True
        yield "attn_q_a_norm.weight", (self.q_lora,), True
        yield "attn_q_b.weight", (self.q_lora, heads * (self.qk_nope + self.qk_rope)), True
        yield "attn_kv_a_mqa.weight", (h, self.kv_lora + self.qk_rope), True
        yield "attn_kv_a_norm.weight", (self.kv_lora,), True
        yield "attn_k_b.weight", (self.qk_nope, self.kv_lora, heads), True
        yield "attn_v_b.weight", (self.kv_lora, self.v_head, heads), True
        yield "attn_kv_b.weight", (self.kv_lora, heads * (self.qk_nope + self.v_head)), False
        yield "attn_output.weight", (heads * self.v_head, h), True
        indexed = block >= self.layers or self.index_layers[block]
        yield "indexer.attn_k.weight", (h, self.index_dim), indexed
        yield "indexer.attn_q_b.weight", (self.q_lora, self.index_heads * self.index_dim), indexed
        yield "indexer.proj.weight", (h, self.index_heads), indexed
        yield "indexer.k_norm.weight", (self.index_dim,), indexed
        yield "indexer.k_norm.bias", (self.index_dim,), indexed
        if self.is_moe(block):
            f, shared = self.expert_ffn, self.expert_ffn * self.shared_experts
            yield "ffn_gate_inp.weight", (h, self.experts), True
            yield "exp_probs_b.bias", (self.experts,), True
            yield "ffn_gate_exps.weight", (h, f, self.experts), True
            yield "ffn_up_exps.weight", (h, f, self.experts), True
            yield "ffn_down_exps.weight", (f, h, self.experts), True
            if shared:
                yield "ffn_gate_shexp.weight", (h, shared), True
                yield "ffn_up_shexp.weight", (h, shared), True
                yield "ffn_down_shexp.weight", (shared, h), True
        else:
            yield "ffn_gate.weight", (h, self.dense_ffn), True
            yield "ffn_up.weight", (h, self.dense_ffn), True
            yield "ffn_down.weight", (self.dense_ffn, h), True
        if block >= self.layers:
            yield "nextn.eh_proj.weight", (2 * h, h), True
            yield "nextn.enorm.weight", (h,), True
            yield "nextn.hnorm.weight", (h,), True
            yield "nextn.shared_head_norm.weight", (h,), True
            yield "nextn.embed_tokens.weight", (h, self.vocab), False
            yield "nextn.shared_head_head.weight", (h, self.vocab), False


def _vocab(header: GgufHeader) -> int:
    """Rows of the embedding: what the weights hold, which may pass the tokenizer's list."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(header.path, "tensor token_embd.weight", "missing" if embedding is None else "not a matrix")
    return embedding.shape[1]


def _index_layers(header: GgufHeader, layers: int) -> tuple[bool, ...]:
    key = "{arch}.attention.indexer.types"
    if key in header:
        return tuple(bool(kind) for kind in header.integer_per_layer(key, layers))
    return tuple(f"blk.{layer}.indexer.attn_k.weight" in header.tensors for layer in range(layers))
