"""Packed planes stand for the same weights, to fp16, whatever the shape, the scale or the order of the work."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from service.engines.vllm.kernels import reference as ref
from service.engines.vllm.kernels import repack as rp
from service.engines.vllm.kernels.choose import LinearTile
from service.engines.vllm.kernels.linear import COUNTERS, dense, embed, linear
from tests.unit.kernels.interpreted.cases import demo_model, llama_cpp_quantize, raw_blocks, relative

HALF = 4e-4
"""Two roundings to fp16 (scale, weight) are 2.9e-4 in the root mean square."""

REAL = 8e-4
"""Real blocks of Q4_K and Q5_K are lopsided: offsets of several times the weights are rounded too (6.9e-4)."""

ALL = pytest.mark.parametrize("ggml_type", list(ref.BLOCK), ids=list(ref.NAMES.values()))


@ALL
def test_padded_shapes(ggml_type: int) -> None:
    k = 256 if ref.BLOCK[ggml_type][0] == 256 else 160
    raw = raw_blocks(72, k, ggml_type)
    w = rp.repack(raw, ggml_type)
    assert (w.n, w.k, w.rows, w.experts) == (72, k, 128, 1)
    assert relative(dense(w, torch.float32), ref.dequantize(raw, ggml_type)) < HALF


@ALL
@pytest.mark.parametrize("scale", [0.0, 6e-8, 3e-5, 30.0], ids=["zero", "least denormal", "denormal", "large"])
def test_extreme_scales(ggml_type: int, scale: float) -> None:
    raw = raw_blocks(8, 256, ggml_type, scale)
    got, want = dense(rp.repack(raw, ggml_type), torch.float64), ref.dequantize(raw, ggml_type)
    if not bool(want.any()):
        assert not bool(got.any())
    else:
        assert relative(got, want) < HALF


def test_a_damaged_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        rp.repack(raw_blocks(8, 256, ref.Q4_K, float("inf")), ref.Q4_K)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.stack([raw_blocks(72, 256, ref.Q5_K) for _ in range(5)])
    whole = rp.repack(raw, ref.Q5_K, interleave=True)
    for chunk in (72 * 256 * 2, 5 * 256, 1):
        monkeypatch.setattr(rp, "CHUNK", chunk)
        parts = rp.repack(raw, ref.Q5_K, interleave=True)
        assert all(torch.equal(getattr(whole, p), getattr(parts, p)) for p in ("low", "high", "scales"))


def test_shards_of_one_form_join_in_the_order_given() -> None:
    shards = [(raw_blocks(32, 256, t), t) for t in (ref.Q4_K, ref.Q4_1, ref.Q4_0)]
    want = torch.cat([ref.dequantize(raw, t) for raw, t in shards])
    assert relative(dense(rp.repack_shards(shards), torch.float32), want) < HALF


def test_gate_and_up_rows_alternate() -> None:
    raw = raw_blocks(128, 256, ref.Q4_K)
    exact = ref.dequantize(raw, ref.Q4_K)
    got = dense(rp.repack(raw, ref.Q4_K, interleave=True), torch.float32)
    assert relative(got[0::2], exact[:64]) < HALF
    assert relative(got[1::2], exact[64:]) < HALF


def test_embedding_rows() -> None:
    raw, ids = raw_blocks(70, 256, ref.Q6_K), torch.tensor([69, 0, 3, 3, 17])
    got = embed(ids, rp.repack(raw, ref.Q6_K), torch.float32)
    assert relative(got, ref.dequantize(raw, ref.Q6_K)[ids]) < HALF


def test_bits_are_what_they_are_said_to_be() -> None:
    for t, form in rp.FORM.items():
        w = rp.repack(raw_blocks(64, 256, t), t)
        assert w.bytes * 8 == rp.BITS[form] * 64 * 256, ref.NAMES[t]


def test_every_type_of_tensor_in_the_demo_model() -> None:
    seen = set()
    for tensor in gguf.GGUFReader(demo_model()).tensors:
        kind = int(tensor.tensor_type)
        if kind in rp.FORM and (kind, tensor.data.shape[1]) not in seen:
            seen.add((kind, tensor.data.shape[1]))
            raw = torch.from_numpy(np.array(tensor.data[:64]))
            assert relative(dense(rp.repack(raw, kind), torch.float32), ref.dequantize(raw, kind)) < HALF, tensor.name
    assert len(seen) >= 2


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "Q4_0"])
def test_a_real_tensor_as_llama_cpp_quantises_it(name: str) -> None:
    ggml_type = next(t for t, n in ref.NAMES.items() if n == name)
    reader = gguf.GGUFReader(demo_model())
    tensor = next(t for t in reader.tensors if t.name == "blk.7.ffn_down.weight")
    plain = gguf.quants.dequantize(np.array(tensor.data[:64]), tensor.tensor_type)[:, :512]
    raw = torch.from_numpy(llama_cpp_quantize(plain, ggml_type))
    exact, w = ref.dequantize(raw, ggml_type), rp.repack(raw, ggml_type)
    assert relative(exact, torch.from_numpy(plain).double()) < 0.15, "the quantiser and we disagree on the layout"
    assert relative(dense(w, torch.float32), exact) < REAL
    x = torch.randn(2, w.k).bfloat16().float()
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    assert relative(linear(x, w, counters, LinearTile(64, 8, 2, 2, 3)), x.double() @ exact.T) < 1e-3
