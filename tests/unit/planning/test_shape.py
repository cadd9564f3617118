"""Bytes of a model, against hand computation and against published sizes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.config import ModelConfig
from service.errors import UserError
from service.planning import glm5
from service.planning.shape import experts_touched, from_tensors
from service.planning.sources import model_shape
from service.planning.tensors import TYPE_BLOCKS, Tensor, role_of, type_bytes

GIB = 2**30


def one_layer(index: int) -> dict[str, Tensor]:
    prefix = f"blk.{index}."
    rows = glm5.tensors(glm5.UD_Q4_K_XL)
    return {t.name.removeprefix(prefix).removesuffix(".weight"): t for t in rows if t.name.startswith(prefix)}


def test_type_table_is_ggufs_own():
    from gguf.constants import GGML_QUANT_SIZES

    known = {kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    for name, sizes in TYPE_BLOCKS.items():
        if name != "FP8":
            assert known[name] == sizes, name


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(UserError, match="Q9_K"):
        type_bytes("Q9_K", 256)


def test_moe_layer_by_hand():
    layer = one_layer(40)
    # 6144 x 2048 x 256 weights in blocks of 256 weights, 144 bytes each
    assert layer["ffn_gate_exps"].bytes == 6144 * 2048 * 256 // 256 * 144 == 1_811_939_328
    assert layer["ffn_down_exps"].bytes == 1_811_939_328
    assert one_layer(3)["ffn_down_exps"].bytes == 6144 * 2048 * 256 // 256 * 176 == 2_214_592_512
    assert layer["attn_q_a"].bytes == 6144 * 2048 // 256 * 144 == 7_077_888
    assert layer["attn_kv_a_mqa"].bytes == 6144 * 576 // 32 * 34 == 3_760_128
    assert layer["ffn_gate_inp"].bytes == 6144 * 256 * 4 == 6_291_456
    assert layer["attn_output"].bytes == 16384 * 6144 // 256 * 144 == 56_623_104


def test_what_one_rank_reads_of_one_moe_layer_by_hand():
    """The table of docs/planning.md: one token, TP=8, dense MLA."""
    whole = list(one_layer(40).values())
    metadata = glm5.METADATA | {"glm-dsa.block_count": 41, "glm-dsa.nextn_predict_layers": 0}
    shape = from_tensors(metadata, whole)
    read = shape.read_bytes(1, 8)
    experts = 8 * 3 * 6144 * 2048 // 256 * 144 / 8  # eight experts of 256, an eighth of each
    assert read["moe"] == pytest.approx(experts, rel=1e-9)
    linear = (
        7_077_888  # q_a: whole on every rank
        + 3_760_128  # kv_a: whole
        + 2048 * 16384 // 256 * 144 / 8  # q_b
        + 56_623_104 / 8  # o
        + 3 * 6144 * 2048 // 256 * 210 / 8  # shared expert, Q6_K
    )
    assert read["linear"] == pytest.approx(linear, rel=1e-9)
    absorbed = (64 * 192 * 512 + 64 * 512 * 256) * 2 / 8  # k_b and v_b, bf16 in vLLM whatever the file says
    assert read["bf16"] == pytest.approx(6_291_456 + absorbed, rel=1e-9)
    indexer = (6144 * 128 + 2048 * 4096 + 6144 * 32) * 2  # sparse attention: bf16, whole on every rank
    assert shape.read_bytes(1, 8, "sparse")["bf16"] - read["bf16"] == pytest.approx(indexer, rel=1e-9)


def test_dense_layer_by_hand():
    whole = list(one_layer(1).values())
    metadata = glm5.METADATA | {"glm-dsa.block_count": 2, "glm-dsa.nextn_predict_layers": 0}
    read = from_tensors(metadata, whole).read_bytes(1, 8)
    ffn = (2 * 6144 * 12288 // 256 * 144 + 6144 * 12288 // 256 * 210) / 8
    attention = 7_077_888 + 3_760_128 + 2048 * 16384 // 256 * 144 / 8 + 56_623_104 / 8
    assert read["linear"] == pytest.approx(ffn + attention, rel=1e-9)
    assert "moe" not in read


def test_the_file_has_the_published_size_and_parameters():
    shape = model_shape("glm-5")
    assert shape.file_bytes / GIB == pytest.approx(402, abs=0.5)
    # zai-org/GLM-5: 744 B without the MTP layer, 40 B active
    main = sum(t.elements for t in shape.tensors if t.block is None or t.block < shape.layers)
    assert main / 1e9 == pytest.approx(744, rel=0.005)
    assert shape.active_parameters / 1e9 == pytest.approx(40, abs=0.5)


def test_another_published_file_is_met_to_the_second_decimal():
    """AesSedai/GLM-5.1-GGUF Q4_K_M: 432.80 GiB, types Q8_0 / Q4_K / Q4_K / Q5_K."""
    assert model_shape("glm-5-q4_k_m").file_bytes / GIB == pytest.approx(432.80, abs=0.01)


def test_4_4_gigabytes_per_gpu_and_token():
    shape = model_shape("glm-5")
    assert sum(shape.read_bytes(1, 8).values()) / 1e9 == pytest.approx(4.4, abs=0.05)


def test_mla_cache_is_held_whole_by_every_rank_and_gqa_is_split():
    shape = model_shape("glm-5")
    assert shape.kv_bytes_per_token(8) == shape.kv_bytes_per_token(1) == 78 * 576 * 2
    assert shape.kv_bytes_per_token(8, attention="sparse") == 78 * (576 * 2 + 128)
    # sparse attention reads every index key, and the values of at most 2048 tokens a request
    assert shape.kv_read_bytes(2, 10_000, 8, attention="sparse") == 78 * (10_000 * 128 + 4096 * 576 * 2)
    assert shape.kv_read_bytes(2, 3000, 8, attention="sparse") == 78 * 3000 * (128 + 576 * 2)
    assert shape.kv_read_bytes(2, 3000, 8) == 78 * 3000 * 576 * 2
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 512,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
    }
    gqa = from_tensors(metadata, [Tensor("token_embd.weight", (512, 1000), "Q8_0")])
    assert gqa.kv_bytes_per_token(1) == 2 * (2 * 64 + 2 * 64) * 2
    assert gqa.kv_bytes_per_token(8) == gqa.kv_bytes_per_token(2) == gqa.kv_bytes_per_token(1) / 2
    # a tied head is read whole, though the file has it once
    assert gqa.read_bytes(1, 1)["lm_head"] == 512 * 1000 // 32 * 34


def test_a_header_without_a_needed_key_is_refused_by_key():
    metadata = {k: v for k, v in glm5.METADATA.items() if k != "glm-dsa.attention.head_count"}
    with pytest.raises(UserError, match=r"glm-dsa\.attention\.head_count"):
        from_tensors(metadata, glm5.tensors(glm5.UD_Q4_K_XL))


def test_a_file_with_counts_by_layer_and_no_vocab_size(tmp_path: Path):
    """As Gemma's are: arrays of numbers and of words, and a vocabulary that only the embedding tells."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(8)
    writer.add_head_count_kv([2, 4])
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((48, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = model_shape(str(tmp_path / "model.gguf"))
    assert (shape.vocab, shape.kv_heads) == (48, 4)


def test_an_unknown_matrix_is_never_too_fast():
    role = role_of("blk.0.some_new_projection.weight")
    assert not role.split
    assert role.read == "all"


def test_a_real_file_from_disk():
    """SmolLM2-135M Q4_1: the header's own tensors; file size known."""
    path = ModelConfig().file()
    shape = model_shape("demo")
    assert (shape.layers, shape.hidden, shape.vocab, shape.experts) == (30, 576, 49152, 0)
    assert 0 < path.stat().st_size - shape.file_bytes < 0.03 * path.stat().st_size  # the rest is the header
    assert shape.parameters == pytest.approx(134.5e6, rel=0.001)


@given(st.integers(1, 4096))
def test_expected_experts(tokens: int):
    touched = experts_touched(tokens, 8, 256)
    assert 8 - 1e-9 <= touched <= min(256, 8 * tokens) + 1e-9
    assert touched <= experts_touched(tokens + 1, 8, 256)


def test_expected_experts_against_a_draw():
    import random

    rng = random.Random(7)
    draws = [len({e for _ in range(16) for e in rng.sample(range(256), 8)}) for _ in range(400)]
    assert sum(draws) / len(draws) == pytest.approx(experts_touched(16, 8, 256), rel=0.01)
