"""The quant methods in vLLM's own layers, loaded through the plugin's own parameters, on one CPU rank."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from service.engines.vllm import patches, tails
from service.engines.vllm.kernels import quant_method
from service.engines.vllm.kernels import reference as ref
from tests.unit.kernels.interpreted.cases import raw_blocks, relative

pytest.importorskip("vllm")
pytest.importorskip("vllm_gguf_plugin")
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def gguf_config() -> Iterator[Any]:
    """GGUFConfig with our methods, inside a vLLM config and a group of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm_gguf_plugin.quantization.config import GGUFConfig

    quant_method.register()
    quant_method.register()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield GGUFConfig()
    cleanup_dist_env_and_memory()


def merged(config: Any, types: tuple[int, int]) -> tuple[Any, torch.Tensor]:
    """A gate_up layer whose second shard comes first from the file; its exact weights."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    layer = MergedColumnParallelLinear(256, [64, 128], bias=False, quant_config=config, prefix="model.mlp.gate_up_proj")
    raws = [raw_blocks(n, 256, t) for n, t in zip((64, 128), types, strict=True)]
    for shard in (1, 0):
        layer.weight_loader_v2(layer.qweight_type, torch.tensor(types[shard]), shard)
        layer.weight_loader_v2(layer.qweight, raws[shard], shard)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, torch.cat([ref.dequantize(r, t) for r, t in zip(raws, types, strict=True)])


@pytest.mark.parametrize(
    ("types", "parts"),
    [((ref.Q4_K, ref.Q4_K), 1), ((ref.Q4_0, ref.Q4_K), 1), ((ref.Q6_K, ref.Q4_K), 2)],
    ids=["one type", "one form", "two forms"],
)
def test_merged_shards_in_the_order_of_their_ids(gguf_config: Any, types: tuple[int, int], parts: int) -> None:
    layer, exact = merged(gguf_config, types)
    assert len(layer.glm5_parts) == parts and not hasattr(layer, "qweight")
    x = torch.randn(2, 3, 256).bfloat16().float()
    got = layer.quant_method.apply(layer, x)
    assert got.shape == (2, 3, 192)
    assert relative(got, x.double() @ exact.T) < 1e-3


def test_a_tied_embedding_serves_both_ends(gguf_config: Any) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layer = VocabParallelEmbedding(100, 256, params_dtype=torch.float32, quant_config=gguf_config, prefix="model.embed")
    raw = raw_blocks(100, 256, ref.Q6_K)
    layer.qweight_type.weight_loader(layer.qweight_type, torch.tensor(ref.Q6_K))
    layer.qweight.weight_loader(layer.qweight, raw)
    layer.quant_method.process_weights_after_loading(layer)
    exact, ids = ref.dequantize(raw, ref.Q6_K), torch.tensor([[3, 99], [0, 3]])
    assert relative(layer.quant_method.embedding(layer, ids), exact[ids]) < 4e-4
    x = torch.randn(2, 256).bfloat16().float()
    logits = layer.quant_method.apply(layer, x)
    assert relative(logits[:, :100], x.double() @ exact.T) < 1e-3
    assert not bool(logits[:, 100:].any()), "rows that pad the vocabulary are zero"


def test_compiled_with_symbolic_sizes(gguf_config: Any) -> None:
    """One graph, from ids to outputs, for any number of tokens."""
    from vllm.compilation.backends import _decompose_size_nodes
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    table = VocabParallelEmbedding(64, 256, params_dtype=torch.float32, quant_config=gguf_config, prefix="model.embed")
    raw = raw_blocks(64, 256, ref.Q4_K)
    table.qweight_type.weight_loader(table.qweight_type, torch.tensor(ref.Q4_K))
    table.qweight.weight_loader(table.qweight, raw)
    table.quant_method.process_weights_after_loading(table)
    layer, exact = merged(gguf_config, (ref.Q6_K, ref.Q4_K))

    def model(ids: torch.Tensor) -> torch.Tensor:
        return layer.quant_method.apply(layer, table.quant_method.embedding(table, ids))

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        # vLLM replaces every size by its symbolic parts; a node that takes a size as one argument breaks there
        _decompose_size_nodes(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for m in (2, 5):
        ids = torch.randint(0, 64, (m,))
        torch._dynamo.mark_dynamic(ids, 0)
        want = ref.dequantize(raw, ref.Q4_K)[ids] @ exact.T
        assert relative(compiled(ids), want) < 1e-3


def test_types_without_a_packed_form_stay_with_the_plugin(gguf_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    q2_k = 10
    quant_method._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not quant_method.packable([ref.Q4_K, q2_k])
        assert not quant_method.packable([q2_k])
    assert [r.getMessage() for r in caplog.records].count(
        "GGML type 10 has no packed form: vllm-gguf-plugin's kernels run it"
    ) == 1


def test_what_the_plugin_keeps_ends_with_zeros(gguf_config: Any) -> None:
    """Rows of 576 weights, which its matrix kernels leave behind the last row (tails.py)."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    patches._zeros_behind_weights()
    with set_current_vllm_config(VllmConfig(additional_config={"glm5": {"packed": False}})):
        layer = MergedColumnParallelLinear(576, [64, 128], bias=False, quant_config=gguf_config, prefix="gate_up_proj")
    raws = [raw_blocks(n, 576, ref.Q4_1) for n in (64, 128)]
    for shard in (1, 0):
        layer.weight_loader_v2(layer.qweight_type, torch.tensor(ref.Q4_1), shard)
        layer.weight_loader_v2(layer.qweight, raws[shard], shard)
    layer.quant_method.process_weights_after_loading(layer)
    weight = layer.qweight.data
    assert torch.equal(weight, torch.cat(raws))
    assert weight.untyped_storage().tolist()[weight.numel() :] == [0] * tails.TAIL
    assert tails.safe(weight, ref.Q4_1) is weight


def test_settings_that_mean_nothing_are_refused() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    with (
        set_current_vllm_config(VllmConfig(additional_config={"glm5": {"bf16_copies": "some"}})),
        pytest.raises(ValueError, match="bf16_copies"),
    ):
        quant_method.current_settings()


def test_a_layer_keeps_the_plugins_method_when_told_so(gguf_config: Any) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm_gguf_plugin.quantization.linear import GGUFLinearMethod

    with set_current_vllm_config(VllmConfig(additional_config={"glm5": {"packed": False}})):
        plain = ReplicatedLinear(256, 64, bias=False, quant_config=gguf_config, prefix="a")
    packed = ReplicatedLinear(256, 64, bias=False, quant_config=gguf_config, prefix="a")
    assert type(plain.quant_method) is GGUFLinearMethod
    assert type(packed.quant_method).__name__ == "PackedLinearMethod"
