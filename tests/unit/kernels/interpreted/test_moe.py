"""The experts against float64, in both modes: types, skew, other ranks' experts, extreme tokens."""

from __future__ import annotations

import pytest
import torch

from service.engines.vllm.kernels import moe
from service.engines.vllm.kernels import reference as ref
from service.engines.vllm.kernels.choose import LinearTile, MoeTile
from service.engines.vllm.kernels.linear import COUNTERS
from service.engines.vllm.kernels.repack import repack
from tests.unit.kernels.interpreted.cases import GROUPS, PAIRS, experts_oracle, raw_blocks, relative

E, INNER, HIDDEN, TOP_K = 4, 64, 256, 2
EXACT = 1e-3
MODES = pytest.mark.parametrize("tile", [PAIRS, GROUPS], ids=["pairs", "groups"])


class Stack:
    """Experts of two types: packed, and exact."""

    def __init__(self, t13: int, t2: int, inner: int = INNER, hidden: int = HIDDEN) -> None:
        raw13 = torch.stack([raw_blocks(2 * inner, hidden, t13) for _ in range(E)])
        raw2 = torch.stack([raw_blocks(hidden, inner, t2) for _ in range(E)])
        self.w13, self.w2 = repack(raw13, t13, interleave=True), repack(raw2, t2)
        self.exact13 = torch.stack([ref.dequantize(r, t13) for r in raw13])
        self.exact2 = torch.stack([ref.dequantize(r, t2) for r in raw2])

    def check(
        self, x: torch.Tensor, ids: torch.Tensor, tile: MoeTile, expert_map: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights, counters = torch.rand(ids.shape) + 0.1, torch.zeros(COUNTERS, dtype=torch.int32)
        got = moe.experts(x, self.w13, self.w2, weights, ids, expert_map, counters, lambda m: tile)
        local = ids if expert_map is None else expert_map[ids.long()]
        want = experts_oracle(x, self.exact13, self.exact2, weights, local)
        assert not bool(counters.any())
        for token in range(x.shape[0]):
            if bool(want[token].any()):
                assert relative(got[token], want[token]) < EXACT, token
            else:
                assert not bool(got[token].any()), token
        return got


def tokens(m: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(m, hidden).bfloat16().float()


def uniform(m: int, experts: int = E) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:TOP_K] for _ in range(m)]).int()


@MODES
@pytest.mark.parametrize(("t13", "t2"), [(ref.Q4_K, ref.Q4_1), (ref.Q8_0, ref.Q5_0)], ids=["Q4_K/Q4_1", "Q8_0/Q5_0"])
def test_types_may_differ(t13: int, t2: int, tile: MoeTile) -> None:
    Stack(t13, t2).check(tokens(3), uniform(3), tile)


def test_split_k() -> None:
    tile = MoeTile(False, LinearTile(64, 8, 2, 2, 3), LinearTile(64, 8, 1, 2, 2))
    Stack(ref.Q4_K, ref.Q4_0, hidden=512).check(tokens(1, 512), uniform(1), tile)


def test_experts_split_over_programs_add_up_to_the_same() -> None:
    x, stack = tokens(4), Stack(ref.Q4_K, ref.Q4_0)
    x[1] *= 1e-6
    x[2] *= 1e8
    ids = torch.tensor([[0, 1], [1, -1], [2, 0], [-1, -1]], dtype=torch.int32)
    weights, counters = torch.rand(ids.shape) + 0.1, torch.zeros(COUNTERS, dtype=torch.int32)
    split = MoeTile(False, LinearTile(64, 8, 1, 2, 3), LinearTile(64, 8, 2, 2, 2))
    whole, parts = (
        moe.experts(x, stack.w13, stack.w2, weights, ids, None, counters, lambda m, tile=tile: tile)
        for tile in (PAIRS, split)
    )
    assert not bool(counters.any()) and not bool(parts[3].any())
    for token in range(3):
        assert relative(parts[token], whole[token].double()) < 1e-5, token


def test_ragged_inner_and_hidden() -> None:
    Stack(ref.Q4_1, ref.Q4_1, inner=96, hidden=160).check(tokens(2, 160), uniform(2), GROUPS)


def test_all_tokens_to_one_expert_make_more_than_one_block() -> None:
    Stack(ref.Q4_0, ref.Q4_0).check(tokens(9), torch.full((9, TOP_K), 2, dtype=torch.int32), GROUPS)


@MODES
def test_experts_of_other_ranks_add_nothing(tile: MoeTile) -> None:
    expert_map = torch.tensor([-1, 0, -1, 1, 2, -1, 3, -1], dtype=torch.int32)
    ids = torch.tensor([[0, 2], [1, 0], [6, 3], [4, 7]], dtype=torch.int32)
    Stack(ref.Q4_0, ref.Q4_1).check(tokens(4), ids, tile, expert_map)


@MODES
@pytest.mark.parametrize(
    ("t13", "t2", "sizes"),
    [(ref.Q4_K, ref.Q4_1, (1e-4, 1e6)), (ref.Q8_0, ref.Q8_0, (1e-2, 1e12))],
    ids=["Q4_K/Q4_1", "Q8_0/Q8_0"],
)
def test_tokens_of_any_size_keep_their_precision(t13: int, t2: int, sizes: tuple[float, float], tile: MoeTile) -> None:
    x = tokens(4)
    x[1] *= sizes[0]
    x[2] *= sizes[1]
    Stack(t13, t2).check(x, uniform(4), tile)


@MODES
def test_a_token_may_have_one_value_far_above_the_others(tile: MoeTile) -> None:
    x = tokens(3)
    x[1, 7] = 3e3
    Stack(ref.Q4_K, ref.Q4_1).check(x, uniform(3), tile)


def test_extreme_tokens_give_no_nan_in_groups_and_leave_the_others_alone() -> None:
    x, ids = tokens(5), uniform(5)
    stack = Stack(ref.Q4_K, ref.Q4_1)
    weights, counters = torch.ones(ids.shape), torch.zeros(COUNTERS, dtype=torch.int32)
    want = moe.experts(x, stack.w13, stack.w2, weights, ids, None, counters, lambda m: GROUPS)
    x[1] *= 1e30
    x[2] = 0
    x[3] *= 1e-37
    got = moe.experts(x, stack.w13, stack.w2, weights, ids, None, counters, lambda m: GROUPS)
    assert not bool(got.isnan().any())  # 1e60, which got[1] is about, is infinite in float32
    assert not bool(got[2].any())
    assert float(got[3].abs().max()) < 1e-37, "silu(gate) * up of 1e-37 is nothing, and stays so"
    assert torch.equal(got[[0, 4]], want[[0, 4]])


@MODES
def test_a_token_of_nan_answers_nan_and_only_itself(tile: MoeTile) -> None:
    x, ids = tokens(4), uniform(4)
    stack = Stack(ref.Q4_K, ref.Q6_K, inner=256)
    weights, counters = torch.ones(ids.shape), torch.zeros(COUNTERS, dtype=torch.int32)
    want = moe.experts(x, stack.w13, stack.w2, weights, ids, None, counters, lambda m: tile)
    x[1, 9] = float("nan")
    got = moe.experts(x, stack.w13, stack.w2, weights, ids, None, counters, lambda m: tile)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])


def test_many_tokens_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "CHUNK", 2)
    Stack(ref.Q4_0, ref.Q4_0).check(tokens(3), uniform(3), PAIRS)
