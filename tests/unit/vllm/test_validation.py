"""The rules by which tests/gpu/validate_vllm.py judges engines, on made-up answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp")
np = pytest.importorskip("numpy")

from tests.gpu import validate_vllm as script  # noqa: E402
from tests.gpu.cases import Case  # noqa: E402
from tests.tiny_glm.oracle import Truth  # noqa: E402

ARGS = argparse.Namespace(files=Path("tiny"), demo=None, gemma=None)
FP32 = (-0.5, -0.9, -1.3, -2.0, -2.5, -3.0)
"""The truth at every step: token 0, before which 1, 2 and 3 lie 0.4, 0.8 and 1.5 behind."""


def answers(offs: Sequence[float] = (0.0, 0.0), token: int = 0) -> dict[str, Any]:
    """A case's result: a step for each of `offs`, so far off the truth, with `token` chosen in all."""
    steps = [{"token": token, "top": [[t, p + off] for t, p in enumerate(FP32)]} for off in offs]
    return {"answers": {"probes": [{"prompt": [1, 2], "steps": steps}]}}


def judged(tree: dict[str, Any], base: script.Result | None = None, **case: Any) -> tuple[script.Result, str]:
    """A result with its verdict, and the words to it."""
    done = {base.case.name: base} if base else {}
    result = script.Result(Case("mode", "tiny-ud.gguf", same_as=base.case.name if base else "", **case), tree, "")
    result.right, words = script.judge(result, done, ARGS)
    return result, words


@pytest.fixture(autouse=True)
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def truth(model: Any, prompt: list[int], answer: list[int]) -> Truth:
        return Truth([0] * len(answer), np.array([FP32] * len(answer)))

    monkeypatch.setattr(script, "oracle", lambda path: None)
    monkeypatch.setattr(script, "truth", truth)


def pair(base: dict[str, Any], other: dict[str, Any], **case: Any) -> tuple[bool, bool, str]:
    """(whether the base is right, whether the other is right beside it, words)."""
    first, _ = judged(base)
    second, words = judged(other, first, **case)
    return first.right, second.right, words


@pytest.mark.parametrize(
    ("tree", "right"),
    [
        (answers([0.1, 0.1]), True),
        (answers([0.34, -0.34]), True),
        (answers([0.36, 0.36]), False),
        (answers([0.75, -0.75]), False),
        (answers([float("nan"), 0.0]), False),
        (answers(token=2), True),
        (answers(token=3), False),  # near fp32 on average, but no tie
        ({"broken": "no result"}, False),
        ({"stopped": "answers wrongly"}, False),
    ],
)
def test_beside_fp32(tree: dict[str, Any], right: bool) -> None:
    assert judged(tree)[0].right is right


def test_good_modes() -> None:
    assert pair(answers([0.1, 0.1]), answers([0.12, 0.12]))[:2] == (True, True)
    # As far from each other as from the truth.
    assert pair(answers([0.2, -0.2]), answers([0.2, 0.2]))[:2] == (True, True)
    assert pair(answers(), answers(token=1))[:2] == (True, True)


def test_modes_far_apart_on_average_are_wrong_however_far_both_are_off_fp32() -> None:
    assert pair(answers([-0.2, -0.2]), answers([0.3, 0.2]))[:2] == (True, False)
    assert pair(answers([-0.1, 0.1]), answers([0.2, 0.1]))[:2] == (True, True)


def test_a_wide_tie_is_wrong() -> None:
    assert pair(answers(), answers(token=2))[:2] == (True, False)
    # Unless the first is itself so far off fp32 there: it thinks 0.6 between the two, fp32 0.8.
    base, other = answers(), answers()
    base["answers"]["probes"][0]["steps"][1] = {"token": 2, "top": [[0, -1.2], [1, -0.9], [2, -0.6], [3, -2.0]]}
    other["answers"]["probes"][0]["steps"][1]["top"][0][1] = -0.7
    assert pair(base, other)[:2] == (True, True)


def test_beside_a_wrong_mode_nothing_is_right() -> None:
    base, other, words = pair(answers([0.36, 0.36]), answers([0.34, 0.34]))
    assert (base, other) == (False, False)
    assert "mode is wrong itself" in words
    assert judged(answers([0.34, 0.34]))[0].right
    missing = script.Result(Case("gone", "tiny-ud.gguf"), {"broken": "no result"}, "")
    second, words = judged(answers(), missing)
    assert not second.right
    assert "nothing to compare with: gone" in words


def test_the_same_kernels_recorded_give_the_same_tokens() -> None:
    assert pair(answers(), answers([0.01, 0.0]), exact=True)[:2] == (True, True)
    assert pair(answers(), answers(token=1), exact=True)[:2] == (True, False)


def test_faults_must_be_stopped() -> None:
    for tree, right in [({"stopped": "m answers wrongly and may not serve: x"}, True), (answers(), False)]:
        assert judged(tree, stopped="gate")[0].right is right
