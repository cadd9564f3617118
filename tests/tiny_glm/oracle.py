"""The truth for a tiny file: transformers' GlmMoeDsaForCausalLM in fp32 over the file's own dequantised values.

Reads with gguf-py and maps names by hand, on purpose: it shares no code with what it judges.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

PROMPTS = ((5, 11), (23, 12), (64, 13))


@dataclass(frozen=True)
class Truth:
    """What the oracle would do at each step of an answer that it is shown: its own choice, and log-probabilities of
    the whole vocabulary (steps, vocab). An answer whose every token is the choice is the oracle's greedy answer."""

    choices: list[int]
    logprobs: np.ndarray

    @property
    def margin(self) -> float:
        """Smallest distance between the best and the second best token."""
        top = np.sort(self.logprobs, axis=1)
        return float((top[:, -1] - top[:, -2]).min())


def prompts() -> list[list[int]]:
    """Token ids of printable characters."""
    return [np.random.default_rng(seed).integers(33, 90, length).tolist() for length, seed in PROMPTS]


def truth(model: Any, prompt: list[int], answer: list[int]) -> Truth:
    """One forward pass over prompt and answer."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
    return Truth(logits.argmax(-1).tolist(), logits.log_softmax(-1).numpy())


def greedy(model: Any, prompt: list[int], steps: int) -> list[int]:
    """The oracle's own answer, a pass per token."""
    answer: list[int] = []
    for _ in range(steps):
        answer.append(0)
        answer[-1] = truth(model, prompt, answer).choices[-1]
    return answer


def load(path: Path, rounded: tuple[str, ...] = ()) -> Any:
    """The Hugging Face model with the file's weights; those of the roles `rounded` after a detour through Q8_0."""
    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    reader = gguf.GGUFReader(path)

    def key(name: str) -> Any:
        return reader.fields[f"glm-dsa.{name}"].contents()

    mtp = key("nextn_predict_layers") if "glm-dsa.nextn_predict_layers" in reader.fields else 0
    layers, rope = key("block_count") - mtp, key("rope.dimension_count")
    values = {t.name: _values(t) for t in reader.tensors}
    for name in values:
        if name.split(".")[-2] in rounded:
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            values[name] = gguf.quants.dequantize(gguf.quants.quantize(values[name], q8_0), q8_0)
    config = GlmMoeDsaConfig(
        vocab_size=values["token_embd.weight"].shape[0],
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        moe_intermediate_size=key("expert_feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=key("attention.head_count"),
        num_key_value_heads=key("attention.head_count"),
        n_shared_experts=1,
        n_routed_experts=key("expert_count"),
        num_experts_per_tok=key("expert_used_count"),
        routed_scaling_factor=key("expert_weights_scale"),
        kv_lora_rank=key("attention.kv_lora_rank"),
        q_lora_rank=key("attention.q_lora_rank"),
        qk_rope_head_dim=rope,
        qk_nope_head_dim=key("attention.key_length_mla") - rope,
        v_head_dim=key("attention.value_length_mla"),
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        max_position_embeddings=key("context_length"),
        rms_norm_eps=1e-5,
        index_topk=key("attention.indexer.top_k"),
        index_head_dim=key("attention.indexer.key_length"),
        index_n_heads=key("attention.indexer.head_count"),
        first_k_dense_replace=key("leading_dense_block_count"),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base")},
    )
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(config)
    model = model.to_empty(device="cpu").float().eval()
    # to_empty loses what is computed at construction.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    state = {name: torch.from_numpy(value) for name, value in _state(values, layers).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("inv_freq" in name for name in missing), missing
    return model


def _values(tensor: Any) -> np.ndarray:
    kind = tensor.tensor_type
    if kind == gguf.GGMLQuantizationType.BF16:
        raw = np.asarray(tensor.data).view(np.uint16).astype(np.uint32) << 16
        return raw.view(np.float32).reshape([int(n) for n in tensor.shape][::-1])
    return np.array(gguf.quants.dequantize(np.asarray(tensor.data), kind), np.float32)


def _state(values: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    names = {
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn_q_a.weight": "self_attn.q_a_proj.weight",
        "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
        "attn_q_b.weight": "self_attn.q_b_proj.weight",
        "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
        "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
        "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
        "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
        "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
        "ffn_gate_inp.weight": "mlp.gate.weight",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
        "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
        "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
    }
    state = {
        "model.embed_tokens.weight": values["token_embd.weight"],
        "model.norm.weight": values["output_norm.weight"],
        "lm_head.weight": values["output.weight"],
    }
    for layer in range(layers):
        old, new = f"blk.{layer}.", f"model.layers.{layer}."
        for name, target in names.items():
            if old + name in values:
                state[new + target] = values[old + name]
        keys, heads_values = values[old + "attn_k_b.weight"], values[old + "attn_v_b.weight"]
        whole = np.concatenate([keys.transpose(0, 2, 1), heads_values], 1)
        state[new + "self_attn.kv_b_proj.weight"] = whole.reshape(-1, whole.shape[-1])
        if old + "ffn_gate_exps.weight" in values:
            both = [values[f"{old}ffn_{part}_exps.weight"] for part in ("gate", "up")]
            state[new + "mlp.experts.gate_up_proj"] = np.concatenate(both, 1)
    return state
