"""Zero bytes behind raw weights whose rows the plugin's matrix kernels leave."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType as T

from service.engines.vllm import tails


def raw(rows: int, blocks: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, blocks * size), dtype=torch.uint8)


def behind(weight: torch.Tensor) -> list[int]:
    """What a kernel finds after the last row."""
    end = weight.storage_offset() + weight.numel()
    return weight.untyped_storage().tolist()[end : end + tails.TAIL]


@pytest.mark.parametrize(
    ("kind", "weights", "size", "leaves"),
    [
        (T.Q4_1, 576, 20, True),
        (T.Q4_1, 512, 20, False),
        (T.Q8_0, 160, 34, True),
        (T.Q8_0, 1536, 34, False),
        (T.Q8_0, 384, 34, False),
        (T.Q5_0, 32, 22, True),
    ],
)
def test_rows_of_whole_steps_are_left_alone(kind: T, weights: int, size: int, leaves: bool) -> None:
    weight = raw(3, weights // 32, size)
    assert tails.overruns(weight, int(kind)) is leaves
    assert (tails.safe(weight, int(kind)) is weight) is not leaves


def test_of_blocks_of_256_two_types_overrun() -> None:
    assert not tails.overruns(raw(2, 9, 144), int(T.Q4_K))
    assert tails.overruns(raw(2, 1, 84), int(T.Q2_K)) and not tails.overruns(raw(2, 2, 84), int(T.Q2_K))
    assert tails.overruns(raw(2, 3, 110), int(T.Q3_K)) and not tails.overruns(raw(2, 4, 110), int(T.Q3_K))


def test_the_same_bytes_then_zeros_once() -> None:
    weight = raw(5, 18, 20)
    first = tails.tailed(weight)
    assert torch.equal(first, weight) and behind(first) == [0] * tails.TAIL
    assert tails.tailed(first) is first


def test_a_shard_in_the_middle_is_copied() -> None:
    """Behind it lie another type's bytes: finite there, anything here."""
    whole = tails.tailed(raw(6, 18, 20))
    seen = []
    call = tails.before_call(lambda w, x, kind, rows: seen.append(w), 0, 2)
    call(whole[2:4], None, int(T.Q4_1), 2)
    call(whole, None, int(T.Q4_1), 6)
    assert torch.equal(seen[0], whole[2:4]) and behind(seen[0]) == [0] * tails.TAIL
    assert seen[1] is whole


def test_the_plugins_own_kernels_are_called_with_safe_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the places of their arguments: (W, X, type, rows) and (X, W, sorted ids, experts, padded, type, ...)."""
    pytest.importorskip("vllm")
    ops = pytest.importorskip("vllm_gguf_plugin.ops")
    from vllm_gguf_plugin.quantization.fused_moe import GGUFMoEMethod
    from vllm_gguf_plugin.quantization.linear import GGUFLinearMethod

    from service.engines.vllm import patches

    seen: dict[str, tuple[object, ...]] = {}
    for name in ("ggml_mul_mat_a8", "ggml_moe_a8"):
        monkeypatch.setattr(ops, name, lambda *given, name=name: seen.update({name: given}))
    for method in (GGUFMoEMethod, GGUFLinearMethod):
        monkeypatch.setattr(method, "process_weights_after_loading", lambda self, layer: None)
    patches._zeros_behind_weights()
    weight, kind = raw(4, 18, 20), int(T.Q4_1)
    ops.ggml_mul_mat_a8(weight, "x", kind, 4)
    ops.ggml_moe_a8("x", weight, "ids", "experts", "padded", kind, 4, 8, 1)
    for name, at in (("ggml_mul_mat_a8", 0), ("ggml_moe_a8", 1)):
        given = seen[name]
        assert given[at] is not weight and torch.equal(given[at], weight) and behind(given[at]) == [0] * tails.TAIL
    assert seen["ggml_mul_mat_a8"][1:] == ("x", kind, 4)
    assert seen["ggml_moe_a8"][2:] == ("ids", "experts", "padded", kind, 4, 8, 1)
    layer = torch.nn.Module()
    for name in ("w13_qweight", "w2_qweight"):
        setattr(layer, name, torch.nn.Parameter(raw(4, 18, 20), requires_grad=False))
        setattr(layer, f"{name}_type", SimpleNamespace(weight_type=kind, shard_weight_type={}))
    GGUFMoEMethod.process_weights_after_loading(None, layer)
    assert behind(layer.w13_qweight.data) == behind(layer.w2_qweight.data) == [0] * tails.TAIL


def test_layers_are_made_safe_once_after_loading() -> None:
    layer = torch.nn.Module()
    layer.qweight = torch.nn.Parameter(raw(4, 18, 20), requires_grad=False)
    layer.qweight_type = SimpleNamespace(weight_type=int(T.Q4_1), shard_weight_type={})
    order: list[str] = []
    processed = tails.once_loaded(lambda self, layer: order.append("loaded"), ("qweight", "w2_qweight"))
    wanted = layer.qweight.data.clone()
    processed(None, layer)
    assert order == ["loaded"] and torch.equal(layer.qweight.data, wanted)
    assert behind(layer.qweight.data) == [0] * tails.TAIL
