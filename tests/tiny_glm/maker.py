"""Random weights under Hugging Face's names, written as llama.cpp's converter would write them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from tests.tiny_glm.mixes import MIXES
from tests.tiny_glm.quantise import quantise
from tests.tiny_glm.vocabulary import CHAT_TEMPLATE, Vocabulary, vocabulary

ARCH = "glm-dsa"


@dataclass(frozen=True)
class Tiny:
    """Sizes. Head sizes, ranks of the KV side and the indexer are GLM-5's own (Hopper's indexer kernel takes 32 or 64
    heads); the rest is small.

    `expert_ffn` 512 splits over 2 GPUs on whole K-quant blocks (256); 256 does not.
    """

    layers: int = 5
    mtp: int = 1
    hidden: int = 256
    heads: int = 4
    q_lora: int = 256
    kv_lora: int = 512
    nope: int = 192
    rope: int = 64
    v_head: int = 256
    dense_layers: int = 2
    dense_ffn: int = 1024
    experts: int = 16
    experts_used: int = 4
    expert_ffn: int = 512
    index_heads: int = 32
    index_dim: int = 128
    index_topk: int = 2048
    context: int = 4096
    seed: int = 0


def weights(tiny: Tiny, words: Vocabulary) -> dict[str, np.ndarray]:
    """GGUF name -> float32 values, outermost dimension first."""
    rng = np.random.default_rng(tiny.seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    def norm(size: int) -> np.ndarray:
        return 1 + 0.2 * rng.standard_normal(size, np.float32)

    t, found = tiny, {}
    found["token_embd.weight"] = rng.standard_normal((words.size, t.hidden), np.float32)
    found["output_norm.weight"] = norm(t.hidden)
    output = 1.5 * matrix(words.size, t.hidden)
    # Tokens that llama.cpp does not report one by one (parts of UTF-8, control, unused) never win.
    output[~words.printable] = 0
    found["output.weight"] = output
    for block in range(t.layers + t.mtp):
        layer = {
            "attn_norm.weight": norm(t.hidden),
            "attn_q_a.weight": matrix(t.q_lora, t.hidden),
            "attn_q_a_norm.weight": norm(t.q_lora),
            "attn_q_b.weight": 1.5 * matrix(t.heads * (t.nope + t.rope), t.q_lora),
            "attn_kv_a_mqa.weight": matrix(t.kv_lora + t.rope, t.hidden),
            "attn_kv_a_norm.weight": norm(t.kv_lora),
            # kv_b_proj in two: keys transposed, values as they are.
            "attn_k_b.weight": np.ascontiguousarray(matrix(t.heads, t.nope, t.kv_lora).transpose(0, 2, 1)),
            "attn_v_b.weight": matrix(t.heads, t.v_head, t.kv_lora),
            "attn_output.weight": matrix(t.hidden, t.heads * t.v_head),
            "indexer.attn_k.weight": matrix(t.index_dim, t.hidden),
            "indexer.attn_q_b.weight": matrix(t.index_heads * t.index_dim, t.q_lora),
            "indexer.proj.weight": matrix(t.index_heads, t.hidden),
            "indexer.k_norm.weight": norm(t.index_dim),
            "indexer.k_norm.bias": 0.2 * rng.standard_normal(t.index_dim, np.float32),
            "ffn_norm.weight": norm(t.hidden),
        }
        if block < t.dense_layers:
            layer["ffn_gate.weight"] = matrix(t.dense_ffn, t.hidden)
            layer["ffn_up.weight"] = matrix(t.dense_ffn, t.hidden)
            layer["ffn_down.weight"] = matrix(t.hidden, t.dense_ffn)
        else:
            layer["ffn_gate_inp.weight"] = matrix(t.experts, t.hidden)
            layer["exp_probs_b.bias"] = 0.3 * rng.standard_normal(t.experts, np.float32)
            layer["ffn_gate_exps.weight"] = matrix(t.experts, t.expert_ffn, t.hidden)
            layer["ffn_up_exps.weight"] = matrix(t.experts, t.expert_ffn, t.hidden)
            layer["ffn_down_exps.weight"] = matrix(t.experts, t.hidden, t.expert_ffn)
            layer["ffn_gate_shexp.weight"] = matrix(t.expert_ffn, t.hidden)
            layer["ffn_up_shexp.weight"] = matrix(t.expert_ffn, t.hidden)
            layer["ffn_down_shexp.weight"] = matrix(t.hidden, t.expert_ffn)
        if block >= t.layers:
            layer["nextn.eh_proj.weight"] = matrix(t.hidden, 2 * t.hidden)
            layer["nextn.enorm.weight"] = norm(t.hidden)
            layer["nextn.hnorm.weight"] = norm(t.hidden)
            layer["nextn.shared_head_norm.weight"] = norm(t.hidden)
        found |= {f"blk.{block}.{name}": value for name, value in layer.items()}
    return found


def make(path: Path, mix: str = "ud", tiny: Tiny | None = None, **override: np.ndarray | None) -> Path:
    """Write one whole file. `override`: GGUF names (dots as __) to other values, or to None for a tensor left out."""
    tiny, words = tiny or Tiny(), vocabulary()
    writer = gguf.GGUFWriter(path, ARCH)
    _metadata(writer, tiny, words)
    tensors: dict[str, np.ndarray | None] = dict(weights(tiny, words))
    tensors |= {name.replace("__", "."): value for name, value in override.items()}
    for name, values in tensors.items():
        if values is None:
            continue
        kind = _kind(mix, name, values)
        data = quantise(values, kind)
        if kind in (T.F32, T.F16):
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_split(whole: Path, parts: int) -> Path:
    """Split a whole file into `parts` beside it; returns the first part."""
    reader = gguf.GGUFReader(whole)
    stem, tensors = whole.with_suffix(""), list(reader.tensors)
    share = -(-len(tensors) // parts)
    paths = [Path(f"{stem}-{number + 1:05d}-of-{parts:05d}.gguf") for number in range(parts)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, ARCH)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(tensors))
        if number == 0:
            _metadata(writer, _tiny_of(reader), vocabulary())
        for tensor in tensors[number * share : (number + 1) * share]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def _kind(mix: str, name: str, values: np.ndarray) -> T:
    if values.ndim == 1 or "ffn_gate_inp" in name:
        return T.F32
    block = int(name.split(".")[1]) if name.startswith("blk.") else 0
    kind = MIXES[mix](name, block)
    # Rows of k_b are 192 long: no whole K-quant block fits.
    return T.Q8_0 if "attn_k_b" in name and gguf.GGML_QUANT_SIZES[kind][0] > 32 else kind


def _tiny_of(reader: gguf.GGUFReader) -> Tiny:
    def key(name: str) -> int:
        return int(reader.fields[f"{ARCH}.{name}"].contents())

    mtp = key("nextn_predict_layers") if f"{ARCH}.nextn_predict_layers" in reader.fields else 0
    return Tiny(
        layers=key("block_count") - mtp,
        mtp=mtp,
        hidden=key("embedding_length"),
        dense_layers=key("leading_dense_block_count"),
        experts=key("expert_count"),
        experts_used=key("expert_used_count"),
        expert_ffn=key("expert_feed_forward_length"),
        index_topk=key("attention.indexer.top_k"),
        context=key("context_length"),
    )


def _metadata(writer: gguf.GGUFWriter, t: Tiny, words: Vocabulary) -> None:
    writer.add_type("model")
    writer.add_name("tiny GLM-5")
    writer.add_quantization_version(2)
    writer.add_block_count(t.layers + t.mtp)
    writer.add_context_length(t.context)
    writer.add_embedding_length(t.hidden)
    writer.add_feed_forward_length(t.dense_ffn)
    writer.add_head_count(t.heads)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(t.experts)
    writer.add_expert_used_count(t.experts_used)
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(t.expert_ffn)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(t.dense_layers)
    writer.add_vocab_size(words.size)
    writer.add_q_lora_rank(t.q_lora)
    writer.add_kv_lora_rank(t.kv_lora)
    writer.add_key_length(t.kv_lora + t.rope)
    writer.add_value_length(t.kv_lora)
    writer.add_key_length_mla(t.nope + t.rope)
    writer.add_value_length_mla(t.v_head)
    writer.add_rope_dimension_count(t.rope)
    if t.mtp:
        writer.add_nextn_predict_layers(t.mtp)
    writer.add_indexer_head_count(t.index_heads)
    writer.add_indexer_key_length(t.index_dim)
    writer.add_indexer_top_k(t.index_topk)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_eos_token_id(words.id("<|endoftext|>"))
    writer.add_eot_token_id(words.id("<|user|>"))
    writer.add_eom_token_id(words.id("<|observation|>"))
    writer.add_bos_token_id(words.id("[gMASK]"))
    writer.add_unk_token_id(words.id("<|endoftext|>"))
    writer.add_pad_token_id(words.id("<|endoftext|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
