"""Planning's settings are those of the engine that is served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.engines.options import LlamaCppOptions, SimulatedOptions
from service.engines.simulated import make_clock
from service.engines.vllm.options import VllmOptions
from service.errors import UserError
from service.planning import hardware
from service.planning.served import engine_settings, served_model
from service.planning.settings import (
    LADDER,
    SMALL,
    VLLM_CAPTURE_SIZES,
    VLLM_INTERACTIVE_SIZES,
    EngineSettings,
    capture_sizes,
)
from service.planning.sources import model_shape
from service.planning.step_model import StepModel, TokenClock

BOX = "8x-rtx-pro-6000"


def vllm(context_tokens: int = 2048, **options: Any) -> EngineSettings:
    chosen = VllmOptions.model_validate({"tensor_parallel": 8, **options})
    return engine_settings(chosen, model_shape("glm-5"), hardware.box(BOX), slots=56, context_tokens=context_tokens)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tensor_parallel": 4}, {"tp": 4}),
    ({"mtp_tokens": 3}, {"draft_tokens": 3}),
    (
        {"mtp_tokens": 2, "mtp_schedule": ((1, 8, 2), (9, 56, 0))},
        {"draft_tokens": 2, "draft_schedule": ((1, 8, 2), (9, 56, 0))},
    ),
    ({"cuda_graphs": False}, {"graphs": False}),
    ({"graph_sizes": (16, 1)}, {"capture_sizes": (1, 16)}),
    ({"kernels": "plugin"}, {"kernels": "plugin"}),
    ({"kv_type": "fp8"}, {"kv_value_bytes": 1.0}),
    ({"dtype": "float32"}, {"kv_value_bytes": 4.0}),
    ({"attention": "sparse"}, {"attention": "sparse"}),
    ({"context_tokens": 2049}, {"attention": "sparse"}),
    ({"context_tokens": 2049, "attention": "dense"}, {"attention": "dense"}),
    ({"batch_tokens": 4096}, {"prefill_chunk": 4096}),
]


@pytest.mark.parametrize(("options", "fields"), CASES, ids=[",".join(options) for options, _ in CASES])
def test_each_option_of_vllm_reaches_its_setting(options: dict[str, Any], fields: dict[str, Any]) -> None:
    usual = {"capture_sizes": capture_sizes(False, 56, options.get("mtp_tokens", 0))}
    assert vllm(**options) == replace(EngineSettings(tp=8, kernels="hybrid", slots=56), **(usual | fields))


def test_interactivity_captures_every_small_size() -> None:
    assert vllm().padded(11) == (12, True)
    assert vllm().padded(50) == (56, True)  # all slots, exactly
    assert vllm(mode="interactivity").padded(11) == (11, True)
    assert vllm(mode="interactivity").padded(33) == (40, True)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 8, 16, 33, 56, 100, 256, 300, 512, 1024])
@pytest.mark.parametrize("interactive", [True, False])
def test_few_sizes_and_little_padding(slots: int, interactive: bool) -> None:
    sizes = capture_sizes(interactive, slots, 0)
    assert sizes == tuple(sorted(set(sizes)))
    assert len(sizes) <= len(LADDER) + SMALL
    assert (slots in sizes) == (slots <= 512)
    settings = EngineSettings(slots=slots, capture_sizes=sizes)
    for batch in range(1, min(slots, 512) + 1):
        size, graph = settings.padded(batch)
        assert graph
        assert size == batch or not (interactive and batch <= SMALL)
        assert batch < 9 or size <= 1.5 * batch
        assert batch < 256 or size <= 1.25 * batch
        assert batch < slots or size == slots  # a full pool computes nothing for nobody
    # Up to twice as much where a step also computes a piece of a prompt.
    assert min(slots, 512) <= max(sizes) <= min(2 * slots, 512)


def test_with_drafts_the_list_is_vllms() -> None:
    assert capture_sizes(False, 8, 3) == VLLM_CAPTURE_SIZES
    assert capture_sizes(True, 8, 3) == VLLM_INTERACTIVE_SIZES


def test_drafts_shrink_as_the_schedule_says_and_the_last_range_goes_on() -> None:
    settings = vllm(mtp_tokens=3, mtp_schedule=((1, 4, 3), (9, 16, 1)))
    assert [settings.drafts(n) for n in (1, 4, 5, 8, 9, 16, 17, 500)] == [3, 3, 3, 3, 1, 1, 1, 1]
    assert settings.tokens_per_step_of(9) == pytest.approx(1.62)
    assert settings.tokens_per_step_of(4) == pytest.approx(1 + 0.62 + 0.62**2 + 0.62**3) == settings.tokens_per_step


def test_a_scheduled_step_is_that_of_its_own_draft_length() -> None:
    def model(**options: Any) -> StepModel:
        chosen = VllmOptions.model_validate({"tensor_parallel": 8, **options})
        return served_model(chosen, "glm-5", BOX, slots=56, context_tokens=2048)

    scheduled = model(mtp_tokens=3, mtp_schedule=((1, 16, 3), (17, 32, 2), (33, 56, 1)))
    for running, drafts in ((1, 3), (16, 3), (17, 2), (40, 1)):
        constant = model(mtp_tokens=drafts)
        assert scheduled.decode_step_s(running, 9000) == constant.decode_step_s(running, 9000)
        assert scheduled.tokens_per_s(running) == constant.tokens_per_s(running)
        assert scheduled.clock.decode_step_s(running, 0) == constant.clock.decode_step_s(running, 0)


@pytest.mark.parametrize("box", [BOX, "8x-h200", "cpu-2core"])
@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_the_simulated_engine_is_predicted_by_its_own_clock(box: str, mtp: bool, graphs: bool) -> None:
    options = SimulatedOptions(hardware=box, mtp=mtp, cuda_graphs=graphs)
    clock = make_clock(options)
    assert isinstance(clock, TokenClock)
    served = served_model(options, "", box, slots=clock.model.settings.slots, context_tokens=4096)
    assert served == clock.model


def test_llamacpp_is_one_cpu() -> None:
    model = served_model(LlamaCppOptions(), "demo", "cpu-2core", slots=64, context_tokens=4096)
    assert model.tokens_per_s(1) == pytest.approx(161, rel=0.05)  # measured, docs/planning.md
    assert model.settings.prefill_chunk == 512


def test_what_the_step_model_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match="8x-h200 has GPUs, and the step model knows llamacpp on CPUs only"):
        served_model(LlamaCppOptions(), "demo", "8x-h200", slots=4, context_tokens=4096)
    with pytest.raises(UserError, match="cpu-2core has no GPUs, and the step model knows vllm on GPUs only"):
        served_model(VllmOptions(), "glm-5", "cpu-2core", slots=4, context_tokens=4096)
    with pytest.raises(UserError, match="has no MTP layer: it cannot draft 3 tokens"):
        served_model(VllmOptions(mtp_tokens=3), "demo", "1x-h200", slots=4, context_tokens=4096)
    with pytest.raises(UserError, match="TP=8 needs 8 GPUs"):
        served_model(VllmOptions(tensor_parallel=8), "glm-5", "2x-h200", slots=4, context_tokens=4096)
