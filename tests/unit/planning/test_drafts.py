"""Draft lengths by batch size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engines.vllm.options import VllmOptions
from service.planning import hardware
from service.planning import plan as planner
from service.planning.drafts import OVERRATED, careful_rate, schedule
from service.planning.profile import profile_text
from service.planning.settings import EngineSettings
from service.planning.sources import model_shape
from service.planning.step_model import step_model


@given(
    st.sampled_from(["hybrid", "plugin", "marlin"]),
    st.integers(1, 300),
    st.sampled_from([0.2, 0.62, 0.9]),
    st.sampled_from([0, 500, 8000]),
)
@settings(max_examples=40, deadline=None)
def test_a_schedule_covers_every_batch_once_and_never_grows(kernels: str, slots: int, kept: float, context: int):
    found = schedule(step_model("glm-5", kernels=kernels, slots=slots, acceptance=kept), context)
    assert found[0][0] == 1
    assert found[-1][1] == slots
    for (_, last, tokens), (first, _, fewer) in pairwise(found):
        assert first == last + 1
        assert fewer < tokens
    longest = max(tokens for _, _, tokens in found)
    VllmOptions(mtp_tokens=longest, mtp_schedule=found if longest else ())  # as the engine takes it


def test_drafts_that_are_never_kept_are_not_made():
    assert schedule(step_model("glm-5", slots=64, acceptance=0.0), 500) == ((1, 64, 0),)


def test_drafts_that_are_always_kept_are_made():
    assert schedule(step_model("glm-5", slots=4, acceptance=0.95), 500) == ((1, 4, 3),)


def test_a_model_without_mtp_has_no_schedule():
    assert schedule(step_model("demo", "1x-h200", slots=8), 500) == ()


def test_rates_beyond_the_fitted_batches_are_believed_less():
    model = step_model("glm-5", slots=256, draft_tokens=3)
    assert careful_rate(model, 32, 0) == model.tokens_per_s(32)
    assert careful_rate(model, 64, 0) == pytest.approx(model.tokens_per_s(64) / OVERRATED)


def test_the_profile_carries_the_schedule():
    shape = model_shape("glm-5")
    wish = EngineSettings(slots=64)
    made = planner.make(shape, hardware.box("8x-rtx-pro-6000"), wish, context=1000, concurrency=64)
    text = profile_text(made, "x.gguf")
    engine = yaml.safe_load(text)["pools"]["shared"]["engine"]
    assert engine["mtp_tokens"] == 3
    assert "Draft tokens by batch size" in text
    without = planner.make(replace(shape, mtp_layers=0), made.model.box, wish, context=1000, concurrency=64)
    assert "mtp_tokens" not in yaml.safe_load(profile_text(without, "x.gguf"))["pools"]["shared"]["engine"]
