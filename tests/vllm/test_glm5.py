"""GLM-5 in VllmEngine against transformers in fp32: whole and split, TP 1 and 2, with MTP or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from service.engines.vllm import progress
from service.errors import UserError
from service.gguf.cli import check
from tests.tiny_glm.oracle import greedy, prompts, truth
from tests.vllm.conftest import Engines

STEPS = 12
# Log-probabilities of the eight best tokens, against transformers in fp32. Seen: 8e-5.
WITHIN = 1e-3


def agrees(engines: Engines, engine: Any, model: Any) -> None:
    """The engine's greedy answers are the oracle's, token by token, with its log-probabilities."""
    from service.engines.vllm import canary

    for number, prompt in enumerate(prompts()):
        answer = engines.run(canary.ask(engine.layer, tuple(prompt), STEPS, f"oracle-{number}"))
        right = truth(model, prompt, [step.token for step in answer.steps])
        assert [step.token for step in answer.steps] == right.choices
        for step, row in zip(answer.steps, right.logprobs, strict=True):
            assert max(abs(p - row[token]) for token, p in step.top) < WITHIN


@pytest.fixture(scope="module")
def reference(files: dict[str, Path], workplace: Path, plugin: None) -> Path:
    """The gate's reference, by the command."""
    path = workplace / "reference.json"
    app = typer.Typer()
    app.command()(check)
    arguments = [str(files["ud"]), "--cpu", "--dtype", "float32", "--make-reference", str(path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    tree = json.loads(path.read_text())
    assert len(tree["probes"]) == 3
    assert "float32" in tree["made_with"]
    return path


def test_whole_file_one_rank_equals_transformers_and_passes_the_gate(
    engines: Engines, files: dict[str, Path], oracle: Callable[[Path], Any], reference: Path
) -> None:
    engine = engines.start(files["ud"], dtype="float32", reference=str(reference))
    try:
        agrees(engines, engine, oracle(files["ud"]))
        # On CPUs vLLM keeps a process for its worker, and captures nothing.
        steps = ["checking", "starting vLLM", *progress.STEPS.values(), "judging", "ready"]
        assert [phase for phase, _ in groupby(p.phase for p in engine.progress)] == steps
        assert "of the reference" in engine.progress[-1].detail
    finally:
        engines.stop(engine)


def test_split_file_two_ranks_with_mtp_equals_transformers_and_passes_the_gate(
    engines: Engines, files: dict[str, Path], oracle: Callable[[Path], Any], reference: Path, workplace: Path
) -> None:
    # The same tensors in three parts have another identity: the reference is taken over under it.
    from service.engines.vllm.canary import fingerprint
    from service.gguf.header import read_header

    tree = json.loads(reference.read_text()) | {"fingerprint": fingerprint(read_header(files["split"]))}
    moved = workplace / "reference-split.json"
    moved.write_text(json.dumps(tree))
    engine = engines.start(files["split"], dtype="float32", tensor_parallel=2, mtp_tokens=2, reference=str(moved))
    try:
        agrees(engines, engine, oracle(files["ud"]))
        stats = engine.stats()
        assert stats.drafted > 0
        assert stats.accepted <= stats.drafted
    finally:
        engines.stop(engine)


def test_the_oracles_judgement_is_its_own_greedy_answer(files: dict[str, Path], oracle: Callable[[Path], Any]) -> None:
    model, prompt = oracle(files["ud"]), prompts()[0]
    answer = greedy(model, prompt, 4)
    assert truth(model, prompt, answer).choices == answer


# -- faults that need two ranks, put back ----------------------------------------------------------------------------


def test_ranks_that_load_shard_0_are_stopped(engines: Engines, files: dict[str, Path], reference: Path) -> None:
    with pytest.raises(UserError, match="answers wrongly and may not serve: log-probabilities lie off"):
        engines.start(
            files["ud"],
            faults="reference_kernels,rank_missing",
            dtype="float32",
            tensor_parallel=2,
            reference=str(reference),
        )


def test_a_cut_inside_a_block_is_stopped_before_loading(engines: Engines, files: dict[str, Path]) -> None:
    from service.gguf.header import read_header
    from service.gguf.rules import Setup, refusals

    found = refusals(read_header(files["misaligned"]), Setup(tensor_parallel=2))
    assert any("256 / 2 columns are not whole" in text for text in found)


def test_a_cut_inside_a_block_is_stopped_without_the_check(engines: Engines, files: dict[str, Path]) -> None:
    """It loads: only the first answer meets half a block. These kernels see it; CUDA's read on (tests/gpu)."""
    with pytest.raises(UserError, match="could not answer the gate's prompts"):
        engines.start(files["misaligned"], faults="reference_kernels,no_checks", dtype="float32", tensor_parallel=2)
