"""A Hugging Face directory (safetensors, tokenizer) in VllmEngine on CPUs, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from service.errors import UserError
from tests.tiny_glm import Tiny, make
from tests.tiny_glm.oracle import prompts, truth
from tests.tiny_glm.vocabulary import SIZE
from tests.vllm.conftest import Engines

STEPS = 12


@pytest.fixture(scope="module")
def model() -> Any:
    """A small llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        # transformers' own 0.02 leaves every token about as likely as any other.
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def test_a_directory_gives_transformers_tokens(engines: Engines, model: Any, workplace: Path) -> None:
    from service.engines.vllm import canary
    from service.gguf.header import read_header
    from service.gguf.materialise import contents

    place = workplace / "directory"
    model.save_pretrained(place)
    header = read_header(make(workplace / "tokenizer.gguf", "q8_0", Tiny(layers=1, mtp=0, dense_layers=1)))
    for name, text in contents(header, "dense").items():
        if name.startswith("tokenizer"):
            (place / name).write_text(text)
    engine = engines.start(place, dtype="float32")
    try:
        for number, prompt in enumerate(prompts()):
            answer = engines.run(canary.ask(engine.layer, tuple(prompt), STEPS, f"directory-{number}"))
            right = truth(model, prompt, [step.token for step in answer.steps])
            assert [step.token for step in answer.steps] == right.choices
            for step, row in zip(answer.steps, right.logprobs, strict=True):
                assert max(abs(p - row[token]) for token, p in step.top) < 1e-3
        body = {"prompt": "the cat", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = engines.answer(engine, "completions", body)
        # By the directory's own tokenizer: "the", " c", "a", "t".
        assert (answer.output_tokens, answer.prompt_tokens) == (5, 4)
    finally:
        engines.stop(engine)


def test_a_directory_that_attends_sparsely_is_refused_at_once(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(orjson.dumps({"model_type": "glm_moe_dsa"}))
    with pytest.raises(UserError, match=r"glm_moe_dsa attends sparsely.*GGUF"):
        engines.start(tmp_path)
