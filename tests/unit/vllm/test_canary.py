"""The gate before ready: sound answers pass, known garbage does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from service.engines.vllm import canary
from service.engines.vllm.canary import Probe, Reference, Step, Tolerance
from service.engines.vllm.options import VllmOptions
from service.errors import UserError
from service.gguf.header import GgufHeader, read_header
from tests.tiny_glm import make
from tests.unit.vllm.conftest import SMALL

pytest.importorskip("xllamacpp")
torch = pytest.importorskip("torch")


def probe(prompt: int, tokens: list[int], shift: float = 0.0) -> Probe:
    """Sound answers: distributions that differ by prompt and step."""
    steps = tuple(
        Step(t, tuple((t + i, -0.5 - 0.3 * i - 0.01 * ((t + prompt) % 7) + shift) for i in range(canary.TOP)))
        for t in tokens
    )
    return Probe((prompt,), steps)


SOUND = [probe(1, [5, 9, 3]), probe(2, [8, 2, 7]), probe(3, [4, 4, 6])]


def test_structure_of_sound_answers_passes() -> None:
    assert canary.structural_faults(SOUND, 100) == []


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([probe(p, [384] * 3) for p in (1, 2)], "token 384 is not in the vocabulary of 384"),
        ([probe(p, [7] * 3) for p in (1, 2)], "token 7 again and again"),
        ([Probe((p,), (Step(p, tuple((i, -5.0) for i in range(8))),)) for p in (1, 2)], "equally likely"),
        ([Probe((p,), (Step(p, ((3, -0.1), (4, -2.0))),)) for p in (1, 2)], "same for every prompt"),
        ([Probe((p,), (Step(p, ((p, 0.0), (4, -30.0))),)) for p in (1, 2)], "collapsed"),
        ([Probe((1,), (Step(1, ((1, float("nan")),)),))], "not numbers"),
    ],
)
def test_structure_of_garbage_is_caught(answers: list[Probe], words: str) -> None:
    assert any(words in fault for fault in canary.structural_faults(answers, 384)), words


def test_comparison_with_a_reference() -> None:
    reference = Reference("f", 100, "trusted", tuple(SOUND))
    tolerance = Tolerance(0.1, 0.5)
    assert canary.compare(reference, SOUND, tolerance) == []
    assert (
        canary.compare(reference, [probe(p.prompt[0], [s.token for s in p.steps], 0.05) for p in SOUND], tolerance)
        == []
    )
    shifted = [probe(p.prompt[0], [s.token for s in p.steps], 0.2) for p in SOUND]
    assert "on average" in canary.compare(reference, shifted, tolerance)[0]
    other = [replace(p, steps=(Step(60, tuple((60 + i, -0.5) for i in range(8))), *p.steps[1:])) for p in SOUND]
    assert canary.compare(reference, other, tolerance)
    # Where a token differs the rest of that answer is another text and says nothing.
    assert canary.differences(SOUND, [replace(p, steps=(*p.steps[:1], *p.steps[2:])) for p in SOUND])[2] < 9
    assert canary.compare(reference, SOUND[:2], tolerance) == ["the reference was made with other prompts"]


def test_batch_must_not_matter() -> None:
    allowed = Tolerance(0.02, 0.02)
    assert canary.batch_faults(SOUND, SOUND, allowed) == []
    off = [*SOUND[:2], probe(3, [4], 0.1)]
    assert "alone and in a batch of 3" in canary.batch_faults(SOUND, off, allowed)[0]


def test_decoding_must_equal_reading() -> None:
    allowed = Tolerance(0.02, 0.02)
    assert canary.replay_faults(SOUND[0], SOUND[0], allowed) == []
    assert "CUDA graphs or the KV cache" in canary.replay_faults(SOUND[0], probe(1, [5, 9, 3], 0.1), allowed)[0]


def test_reference_survives_its_file_and_strangers_do_not() -> None:
    reference = Reference("f", 100, "trusted", tuple(SOUND))
    assert Reference.from_json(reference.to_json(), "x") == reference
    for text in ("", "{}", "[]", '{"format": 9}', reference.to_json().replace('"token": 5', '"token": "a"')):
        with pytest.raises(UserError, match="x is not a reference"):
            Reference.from_json(text, "x")


def test_the_reference_must_be_this_files(place: Path, mixed: GgufHeader) -> None:
    path = place / "reference.json"
    assert canary.read_reference(VllmOptions(), mixed) is None
    options = VllmOptions(reference=str(path))
    with pytest.raises(UserError, match="does not exist; make it with"):
        canary.read_reference(options, mixed)
    path.write_text(Reference("f", 100, "trusted", tuple(SOUND)).to_json())
    with pytest.raises(UserError, match="was made for another file"):
        canary.read_reference(options, mixed)
    path.write_text(Reference(canary.fingerprint(mixed), 100, "trusted", tuple(SOUND)).to_json())
    assert canary.read_reference(options, mixed) is not None


def test_fingerprint_sees_data_that_the_header_does_not(place: Path) -> None:
    first = read_header(make(place / "one.gguf", "q8_0", SMALL))
    second = read_header(make(place / "two.gguf", "q8_0", replace(SMALL, seed=1)))
    assert first.identity == second.identity
    assert canary.fingerprint(first) != canary.fingerprint(second)
