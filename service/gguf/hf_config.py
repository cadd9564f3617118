"""config.json as Hugging Face writes it, made from a GGUF header.

glm-dsa is mapped here key by key; other architectures go through transformers' own mapping where it has one.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from service.errors import UserError
from service.gguf.errors import GgufError
from service.gguf.glm_dsa import ARCHITECTURE, GlmDsa
from service.gguf.header import GgufHeader
from service.gguf.tokenizer import stop_tokens
from service.gguf.wire import STRING

Attention = Literal["dense", "sparse"]

_INDEXER_KEYS = ("index_topk", "index_head_dim", "index_n_heads", "index_topk_pattern", "indexer_types")
_GATES = {1: "softmax", 2: "sigmoid"}


def hf_config(header: GgufHeader, attention: Attention) -> dict[str, Any]:
    """The content of config.json. `attention` matters for glm-dsa only: dense drops the indexer, which is exact while
    a context is no longer than `index_topk` tokens, because the indexer would keep them all. Raises GgufError."""
    if header.architecture == ARCHITECTURE:
        return _glm_dsa(header, attention)
    return _through_transformers(header)


def _glm_dsa(header: GgufHeader, attention: Attention) -> dict[str, Any]:
    shape = GlmDsa.from_header(header)
    if header.text("{arch}.rope.scaling.type", "none") != "none":
        raise GgufError(header.path, f"key {ARCHITECTURE}.rope.scaling.type", "scaled rope is not supported")
    gate = header.integer("{arch}.expert_gating_func", 2)
    if gate not in _GATES:
        raise GgufError(header.path, f"key {ARCHITECTURE}.expert_gating_func", f"{gate} is unknown")
    stops = stop_tokens(header)
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_ffn,
        "moe_intermediate_size": shape.expert_ffn,
        "num_hidden_layers": shape.layers,
        "num_nextn_predict_layers": shape.mtp_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "n_shared_experts": shape.shared_experts,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_used,
        "routed_scaling_factor": _shortest(header.number("{arch}.expert_weights_scale", 1.0)),
        "norm_topk_prob": header.boolean("{arch}.expert_weights_norm", False),
        # vLLM would take softmax, and no correction bias, if these two were left out.
        "scoring_func": _GATES[gate],
        "topk_method": "noaux_tc",
        "n_group": max(1, header.integer("{arch}.expert_group_count", 1)),
        "topk_group": max(1, header.integer("{arch}.expert_group_used_count", 1)),
        "kv_lora_rank": shape.kv_lora,
        "q_lora_rank": shape.q_lora,
        "qk_rope_head_dim": shape.qk_rope,
        "qk_nope_head_dim": shape.qk_nope,
        "qk_head_dim": shape.qk_nope + shape.qk_rope,
        "v_head_dim": shape.v_head,
        "head_dim": shape.qk_rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": _shortest(header.number("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": header.number("{arch}.rope.freq_base")},
        "rope_interleave": True,
        # GLM-5's indexer rotates interleaved pairs; the class default is DeepSeek's halves.
        "indexer_rope_interleave": True,
        "index_head_dim": shape.index_dim,
        "index_n_heads": shape.index_heads,
        "index_topk": shape.index_topk,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": None,
        "eos_token_id": stops,
        "pad_token_id": header.integer("tokenizer.ggml.padding_token_id", stops[0] if stops else 0),
    }
    if not all(shape.index_layers):
        # vLLM reads the pattern, transformers the list.
        config["index_topk_pattern"] = "".join("F" if full else "S" for full in shape.index_layers)
        config["indexer_types"] = ["full" if full else "shared" for full in shape.index_layers]
    if attention == "dense":
        for key in _INDEXER_KEYS:
            config.pop(key, None)
        # glm_moe_dsa's class default of index_topk is 2048, so leaving the key out would not be enough.
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    return config


def _through_transformers(header: GgufHeader) -> dict[str, Any]:
    try:
        from transformers import AutoConfig
        from transformers.utils import logging as hf_logging
    except ImportError as missing:
        raise UserError(f"reading a {header.architecture} file for vLLM needs transformers: {missing}") from None
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(header.path, "tensor token_embd.weight", "missing or not a matrix")
    hf_logging.set_verbosity(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="glm5-header-") as place:
        _write_stub(header, Path(place) / "stub.gguf")
        try:
            config = AutoConfig.from_pretrained(place, gguf_file="stub.gguf")
        except (ValueError, KeyError, OSError) as fault:
            problem = f"{header.architecture}: transformers cannot read it ({fault})"
            raise GgufError(header.path, "key general.architecture", problem) from None
    found: dict[str, Any] = config.to_dict()
    found["vocab_size"] = embedding.shape[1]
    found["tie_word_embeddings"] = "output.weight" not in header.tensors
    found["dtype"] = "bfloat16"
    found["rms_norm_eps"] = _shortest(found.get("rms_norm_eps", 1e-6))
    stops = stop_tokens(header)
    if stops:
        found["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    if "tokenizer.ggml.bos_token_id" in header:
        found["bos_token_id"] = header.integer("tokenizer.ggml.bos_token_id")
    for key in ("_name_or_path", "_model_name_or_path"):
        found.pop(key, None)
    return found


def _write_stub(header: GgufHeader, path: Path) -> None:
    """A file with the plain keys alone. transformers' reader takes 40 s for a vocabulary of 262,144 tokens that it does
    not need here, and it would trust counts that it finds in the original."""
    import gguf

    writer = gguf.GGUFWriter(path, header.architecture)
    for key, value in header.metadata.items():
        if key.startswith("tokenizer.") or key in ("general.architecture", "general.alignment"):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int64(key, value) if value < 0 else writer.add_uint64(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value.kind != STRING and 0 < value.length <= 4096:
            writer.add_array(key, value.values())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shortest(value: float) -> float:
    """A number that was stored in single precision, as its author wrote it: 9.99999997e-07 -> 1e-06."""
    return float(str(np.float32(value)))
