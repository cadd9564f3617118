"""Which calibrated constants belong to a model, a box and settings, with how they were obtained."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from service.planning.hardware import DATA, Box
from service.planning.settings import Calibration, EngineSettings
from service.planning.shape import ModelShape

FILE = DATA / "calibration.json"
OTHER_LINK_ERROR = 0.15  # the back-test's goal: kernels calibrated, link only published


@lru_cache(maxsize=1)
def stored() -> dict[str, Calibration]:
    """Fitted constants by name, as the back-test wrote them; empty before the first back-test."""
    if not FILE.is_file():
        return {}
    loaded: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["calibrations"]
    return {name: from_json(entry) for name, entry in loaded.items()}


def from_json(entry: dict[str, Any]) -> Calibration:
    known = {f.name for f in fields(Calibration)}
    values = {k: v for k, v in entry.items() if k in known}
    if "moe_efficiency" in values:
        values["moe_efficiency"] = tuple((float(m), float(e)) for m, e in values["moe_efficiency"])
    return Calibration(**values)


def choose(shape: ModelShape, box: Box, settings: EngineSettings) -> Calibration:
    """The fitted constants made for this case, else the defaults (measured on one H200 and transferred)."""
    if settings.runtime == "llamacpp":
        return Calibration(
            host_step_s=0.0, host_request_s=0.0, kv_efficiency=1.0, source="roofline of the CPU, one measured model"
        )
    fitted = stored()
    if settings.kernels in fitted and box.gpu.name == "rtx-pro-6000":
        found = fitted[settings.kernels]
        if settings.kernels == "plugin" and box.link.name != "pcie5-reference":
            # its all-reduce was fitted to the reference operator's box; another link has its own table
            return replace(found, allreduce_scale=1.0, error=max(found.error or 0.0, OTHER_LINK_ERROR))
        return found
    if shape.mla and shape.experts and "reference" in fitted and settings.kernels in ("plugin", "marlin", "hybrid"):
        # the host's launches per layer were calibrated on the same model; kernels of another family stay transferred
        reference = fitted["reference"]
        return Calibration(eager_layer_s=reference.eager_layer_s, source="H200 kernel table, transferred")
    return Calibration()
