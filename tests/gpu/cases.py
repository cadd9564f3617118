"""The engines that validate_vllm.py starts: file, settings, what each is compared with or must be stopped by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

SOUND = {
    "tiny-ud.gguf": "dense eager",
    "tiny-w1_over_w3.gguf": "w1 Q6_K, w3 Q4_K",
    "tiny-misaligned.gguf": "misaligned TP=1",
}
"""Faults are judged against the answers of the sound engine on the same file, as an operator would do it."""


@dataclass(frozen=True)
class Case:
    """One engine. `same_as`: the case whose tokens it must give. `faults`: what is put back, then the gate (`stopped`:
    gate) or the check before loading (check) must stop it."""

    name: str
    file: str
    options: dict[str, Any] = field(default_factory=dict)
    same_as: str = ""
    faults: str = ""
    stopped: str = ""
    exact: bool = False

    @property
    def gpus(self) -> int:
        return int(self.options.get("tensor_parallel", 1))


def cases(gpus: int, demo: bool, gemma: bool) -> list[Case]:
    ud, two = "tiny-ud.gguf", {"tensor_parallel": 2}
    # The plugin's kernels unless `packed` says otherwise, later in the same dictionary.
    plugin: dict[str, Any] = {"kernels": "plugin"}
    eager, packed = {**plugin, "cuda_graphs": False}, {"kernels": "packed"}
    dense, sparse = {**plugin, "attention": "dense"}, {**plugin, "attention": "sparse"}
    # The same kernels recorded: the tokens must be equal, not alike.
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(range(1, 9))}
    recorded = {"extra_args": [f"--compilation-config={json.dumps(graphs)}"]}
    found = [
        Case("dense eager", ud, {**dense, **eager}),
        Case("dense recorded", ud, {**dense, **recorded}, "dense eager", exact=True),
        Case("dense graph", ud, dense, "dense eager"),
        Case("dense graph MTP", ud, {**dense, "mtp_tokens": 2}, "dense eager"),
        Case("sparse eager", ud, {**sparse, **eager}, "dense eager"),
        Case("sparse recorded", ud, {**sparse, **recorded}, "sparse eager", exact=True),
        Case("sparse graph", ud, sparse, "sparse eager"),
        Case("sparse graph MTP", ud, {**sparse, "mtp_tokens": 2}, "sparse eager"),
        Case("packed dense eager", ud, {**dense, **eager, **packed}, "dense eager"),
        Case("packed dense recorded", ud, {**dense, **recorded, **packed}, "packed dense eager", exact=True),
        Case("packed dense graph", ud, {**dense, **packed}, "packed dense eager"),
        Case("packed dense graph MTP", ud, {**dense, **packed, "mtp_tokens": 2}, "packed dense eager"),
        Case("packed sparse graph MTP", ud, {**sparse, **packed, "mtp_tokens": 2}, "packed dense eager"),
        Case("w1 Q6_K, w3 Q4_K", "tiny-w1_over_w3.gguf", {**dense, **eager}),
        Case("misaligned TP=1", "tiny-misaligned.gguf", {**dense, **eager}),
        Case("fault: w1/w3 types", "tiny-w1_over_w3.gguf", {**dense, **eager}, faults="w1_w3_types", stopped="gate"),
        Case("fault: shards unsorted", ud, {**dense, **eager}, faults="shards_unsorted", stopped="gate"),
    ]
    found += [
        Case("gemma eager", "gemma", eager),
        Case("gemma packed eager", "gemma", {**eager, **packed}),
        Case("demo eager", "demo", eager),
        Case("demo graph", "demo", plugin, "demo eager"),
        Case("demo packed eager", "demo", {**eager, **packed}),
        Case("demo packed graph", "demo", packed, "demo packed eager"),
    ]
    if gpus > 1:
        found += [
            Case("dense eager TP=2", ud, {**dense, **eager, **two}, "dense eager"),
            Case("dense graph MTP TP=2", ud, {**dense, **two, "mtp_tokens": 2}, "dense eager"),
            Case("sparse graph TP=2", ud, {**sparse, **two}, "sparse eager"),
            Case(
                "packed dense graph MTP TP=2",
                ud,
                {**dense, **packed, **two, "mtp_tokens": 2, "profiler": True},
                "packed dense eager",
            ),
            Case("demo TP=2", "demo", two, stopped="check"),
            Case("gemma eager TP=2", "gemma", {**eager, **two}, "gemma eager"),
            Case("gemma packed graph TP=2", "gemma", {**packed, **two}, "gemma packed eager"),
            Case("fault: rank missing TP=2", ud, {**dense, **eager, **two}, faults="rank_missing", stopped="gate"),
            Case("fault: misaligned TP=2", "tiny-misaligned.gguf", {**dense, **eager, **two}, stopped="check"),
            Case(
                "fault: misaligned, unchecked",
                "tiny-misaligned.gguf",
                {**dense, **eager, **two},
                faults="no_checks",
                stopped="gate",
            ),
        ]
    return [case for case in found if {"demo": demo, "gemma": gemma}.get(case.file, True)]
