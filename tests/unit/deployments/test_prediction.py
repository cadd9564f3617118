"""The step predicted beside a live replica is that of its engine as it is set."""

from __future__ import annotations

import pytest

from deployments.prediction import CONTEXT, Prediction
from service.config import PROFILES, load
from service.planning.step_model import step_model
from service.types import EngineStats

BOX = "8x-rtx-pro-6000"
ENGINE = "pools.shared.engine"
WITHOUT_DRAFTS = (f"{ENGINE}.mtp_tokens=0", f"{ENGINE}.mtp_schedule=[]")
EAGER = (f"{ENGINE}.cuda_graphs=false",)


def prediction(*sets: str, profile: str = "one-box-8gpu.yaml") -> Prediction | None:
    config = load(PROFILES / profile, ["model.path=glm-5", *sets])
    return Prediction.of(config, config.pools["shared"])


def step_ms(*sets: str, running: int, context: int = 0) -> float:
    """Of the shipped profile on the box, each request holding `context` tokens of prompt."""
    found = prediction(f"pools.shared.hardware={BOX}", *sets)
    assert found is not None
    step = found.step_s(EngineStats(slots=56, running=running, requests=running, prompt_tokens=running * context))
    assert step is not None
    return step * 1e3


@pytest.mark.parametrize(
    ("sets", "alone", "eight"),
    [
        pytest.param((), 17.7, 38.4, id="as shipped"),
        pytest.param(WITHOUT_DRAFTS, 13.7, 20.5, id="without drafts"),
        pytest.param(EAGER, 51.1, 51.6, id="eager"),
        pytest.param((*WITHOUT_DRAFTS, *EAGER), 50.0, 50.2, id="neither"),
    ],
)
def test_the_shipped_box_has_drafts_and_graphs(sets: tuple[str, ...], alone: float, eight: float) -> None:
    assert step_ms(*sets, running=1) == pytest.approx(alone, rel=0.005)
    assert step_ms(*sets, running=8) == pytest.approx(eight, rel=0.005)


def test_drafts_shrink_with_the_batch_as_the_profile_says() -> None:
    """mtp_schedule drafts one token with 40 requests, not three."""
    one = step_model("glm-5", BOX, tp=8, attention="sparse", draft_tokens=1).decode_step_s(40, 0)
    three = step_model("glm-5", BOX, tp=8, attention="sparse", draft_tokens=3).decode_step_s(40, 0)
    assert step_ms(running=40) == pytest.approx(one * 1e3) != pytest.approx(three * 1e3)


def test_context_is_counted() -> None:
    """Dense attention on this box: 78 layers of 576 bf16 values a token, at the model's share of 1.79 TB/s."""
    dense = (f"{ENGINE}.attention=dense",)
    model = step_model("glm-5", BOX)
    per_token_ms = 78 * 576 * 2 / (1792e9 * model.calibration.kv_efficiency) * 1e3
    longer = step_ms(*dense, running=8, context=6000) - step_ms(*dense, running=8)
    assert longer == pytest.approx(8 * 6000 * per_token_ms, rel=1e-6)
    assert longer > 1.0


def test_half_of_the_answers_is_held_on_average() -> None:
    found = prediction(f"pools.shared.hardware={BOX}")
    assert found is not None
    prompts = EngineStats(slots=56, running=2, requests=10, prompt_tokens=10 * 3000)
    answers = EngineStats(slots=56, running=2, requests=10, prompt_tokens=10 * 2000, output_tokens=10 * 2000)
    assert found.step_s(prompts) == found.step_s(answers)


def test_nothing_runs_nothing_is_predicted() -> None:
    found = prediction(f"pools.shared.hardware={BOX}")
    assert found is not None
    assert found.step_s(EngineStats(slots=56)) is None


def test_the_pools_hardware_counts_with_the_simulated_engine_too() -> None:
    def step(*sets: str) -> float | None:
        found = prediction(*sets, profile="local-cpu.yaml")
        return found and found.step_s(EngineStats(slots=8, running=1, requests=1))

    plain = f"{ENGINE}={{name: simulated}}"
    assert step(plain, "pools.shared.hardware=") is None
    h200 = step_model("glm-5", "8x-h200").decode_step_s(1, 0)
    assert step(plain, "pools.shared.hardware=8x-h200") == h200
    assert step(f"{ENGINE}={{name: simulated, hardware: 8x-h200}}", "pools.shared.hardware=") == h200
    both = step(f"{ENGINE}={{name: simulated, hardware: {BOX}}}", "pools.shared.hardware=8x-h200")
    assert both == h200, "the pool's own word on its hardware goes first"


def test_the_simulated_engines_steps_are_shorter_where_it_drafts() -> None:
    """It emits one token a step: its measured step is the model's divided by the tokens kept."""
    found = prediction(
        f"{ENGINE}={{name: simulated, mtp: true, hardware: {BOX}}}", "pools.shared.hardware=", profile="local-cpu.yaml"
    )
    assert found is not None
    model = step_model("glm-5", BOX, mtp=True)
    assert found.step_s(EngineStats(slots=8, running=2, requests=2)) == model.clock.decode_step_s(2, 0)


def test_an_unknown_box_or_model_is_served_without_a_prediction() -> None:
    assert prediction() is None, "the profile names no hardware"
    assert prediction("pools.shared.hardware=8x-h2000") is None
    assert prediction("model.path=/nowhere.gguf", f"pools.shared.hardware={BOX}") is None
    assert prediction("pools.shared.hardware=cpu-2core") is None, "vLLM's CPU build is not in the step model"


def test_the_curve_goes_to_the_slots_and_is_the_planners() -> None:
    found = prediction(f"pools.shared.hardware={BOX}", *WITHOUT_DRAFTS)
    assert found is not None
    curve = found.curve()
    assert list(curve) == [1, 2, 4, 8, 16, 32]
    for requests, rate in curve.items():
        assert rate == pytest.approx(requests / step_ms(*WITHOUT_DRAFTS, running=requests, context=CONTEXT) * 1e3)
