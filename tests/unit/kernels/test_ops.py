"""The custom ops: fakes tell the truth about shapes, and a compiled graph keeps them whole for any number of tokens."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from service.engines.vllm.kernels import ops
from service.engines.vllm.kernels.linear import COUNTERS
from service.engines.vllm.kernels.offline import meta_packed

ops.register()


def planes(form: int, n: int, k: int, experts: int = 1) -> tuple[torch.Tensor, ...]:
    meta = meta_packed(form, n, k, experts)
    return tuple(torch.empty(t.shape, dtype=t.dtype) for t in (meta.low, meta.high, meta.scales))


def test_registering_twice_is_once() -> None:
    assert ops.register() is ops.register()


def test_fakes() -> None:
    with FakeTensorMode():
        x, counters = torch.empty(5, 256, dtype=torch.bfloat16), torch.empty(COUNTERS, dtype=torch.int32)
        out = torch.ops.glm5.packed_linear(x, *planes(4, 72, 256), None, counters, 4, 72, 256, 1.0)
        assert (out.shape, out.dtype) == ((5, 72), torch.bfloat16)
        rows = torch.ops.glm5.packed_embed(
            torch.empty(7, dtype=torch.long), *planes(6, 72, 256), 6, 72, 256, 1.0, torch.half
        )
        assert (rows.shape, rows.dtype) == ((7, 256), torch.half)
        ids = torch.empty(5, 2, dtype=torch.int32)
        w13, w2 = planes(4, 128, 256, 4), planes(5, 256, 256, 4)
        out = torch.ops.glm5.packed_experts(x, *w13, *w2, torch.empty(5, 2), ids, None, counters, 4, 5, 64, 1.0, 1.0)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)


def test_one_compiled_graph_for_any_number_of_tokens() -> None:
    weights, counters = planes(4, 64, 64), torch.zeros(COUNTERS, dtype=torch.int32)
    graphs = []

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append([n.target for n in module.graph.nodes if n.op == "call_function"])

        def run(*given: object) -> tuple[torch.Tensor]:
            x = next(g for g in given if torch.is_tensor(g) and g.shape[1:] == (64,))
            return (x.new_empty(x.shape[0], 64),)

        return run

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.glm5.packed_linear(x, *weights, None, counters, 4, 64, 64, 1.0)

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for m in (2, 3, 17):
        compiled(torch.zeros(m, 64))
    assert len(graphs) == 1
    assert torch.ops.glm5.packed_linear in graphs[0] or torch.ops.glm5.packed_linear.default in graphs[0]


def test_copies_take_over_at_many_tokens() -> None:
    copy, counters = torch.randn(64, 64), torch.zeros(COUNTERS, dtype=torch.int32)
    x = torch.randn(ops.COPY_FROM, 64)
    got = torch.ops.glm5.packed_linear(x, *planes(4, 64, 64), copy, counters, 4, 64, 64, 1.0)
    assert torch.equal(got, x @ copy.T)
