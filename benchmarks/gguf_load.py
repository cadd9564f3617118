"""How fast GGUF weights leave the file: python benchmarks/gguf_load.py [--gb 3] [--place DIR]

Writes a synthetic GLM-5 file with the real sizes of its matrices (64 experts, few layers, random bytes), then reads it
as one rank of TP=1 and of TP=8 would: each tensor is cut as vLLM's loader cuts it and copied to memory that was there
before. Beside it the plugin's own way: copy each tensor, then hand over expert by expert. The file lies in the page
cache after the first pass, so the numbers are the code's, not the disk's; the first pass is given too.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from service.engines.vllm.weights import TensorFiles, stream
from service.gguf.header import GgufHeader, read_header
from service.gguf.plan import weights_plan
from service.gguf.rules import Setup, verdicts
from service.gguf.split import cut
from tests.tiny_glm.maker import ARCH, Tiny, _metadata
from tests.tiny_glm.mixes import MIXES
from tests.tiny_glm.vocabulary import vocabulary

REAL = Tiny(
    layers=2, mtp=0, hidden=6144, heads=64, q_lora=2048, dense_layers=0, dense_ffn=12288, experts=64,
    experts_used=8, expert_ffn=2048, index_heads=32, context=202_752,
)  # fmt: skip


def write(path: Path, gigabytes: float) -> GgufHeader:
    """A file of about `gigabytes`, of whole layers."""
    from service.gguf.glm_dsa import GlmDsa

    per_layer = 1.45
    layers = max(1, round(gigabytes / per_layer))
    tiny, words = replace(REAL, layers=layers), vocabulary()
    shape = GlmDsa(
        layers=layers, mtp_layers=0, hidden=6144, heads=64, q_lora=2048, kv_lora=512, qk_nope=192, qk_rope=64,
        v_head=256, dense_layers=0, dense_ffn=12288, experts=64, experts_used=8, expert_ffn=2048, shared_experts=1,
        vocab=words.size, context=202_752, index_heads=32, index_dim=128, index_topk=2048,
        index_layers=(True,) * layers,
    )  # fmt: skip
    writer = gguf.GGUFWriter(path, ARCH)
    _metadata(writer, tiny, words)
    noise = np.random.default_rng(0).integers(0, 120, 1 << 26, np.uint8)
    todo = []
    for name, size, needed in shape.tensors():
        if not needed and name != "output.weight":
            continue
        plain = len(size) == 1 or "gate_inp" in name
        block = int(name.split(".")[1]) if name.startswith("blk.") else 0
        kind = gguf.GGMLQuantizationType.F32 if plain else MIXES["ud"](name, block)
        values, width = gguf.GGML_QUANT_SIZES[kind]
        shape_bytes = (*size[:0:-1], size[0] // values * width)
        total = int(np.prod(shape_bytes))
        writer.add_tensor_info(name, shape_bytes, np.dtype(np.uint8), total, raw_dtype=kind)
        todo.append(total)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    for total in todo:
        for start in range(0, total, noise.size):
            out.write(noise[: min(noise.size, total - start)].tobytes())
        writer.write_padding(out, total)
    writer.close()
    return read_header(path)


class Rank:
    """Takes a rank's part of each tensor, as vLLM does, into memory that it keeps."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._room = torch.empty(1 << 30, dtype=torch.uint8)
        self._room.fill_(1)
        self.bytes = self.calls = 0

    def take(self, name: str, tensor: torch.Tensor, how: str) -> None:
        self.calls += 1
        if tensor.dim() == 0:
            return
        data = tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor
        if how != "whole" and data.dim() > 1:
            axis = data.dim() - (1 if how == "columns" else 2)
            share = data.shape[axis] // self._ranks
            data = data.narrow(axis, self._rank * share, share)
        self._room[: data.numel()].view(data.shape).copy_(data)
        self.bytes += data.numel()


def ours(header: GgufHeader, ranks: int) -> Rank:
    plan = weights_plan(header, "main", indexer=False, dequantise_all=False)
    taker = Rank(0, ranks)
    cuts = {step.target.format(0).removesuffix("weight"): cut(step.tensor.name) for step in plan.steps}
    with TensorFiles(header) as files:
        for name, tensor in stream(files, [s for s in plan.steps if s.form == "quantised"], plan.bytes):
            stem = name.removesuffix("qweight_type").removesuffix("qweight")
            taker.take(name, tensor, cuts[stem])
    return taker


def plugins(header: GgufHeader, ranks: int) -> Rank:
    """vllm-gguf-plugin's iterator and its loop over experts."""
    from vllm_gguf_plugin.weight_utils import gguf_quant_weights_iterator_multi

    plan = weights_plan(header, "main", indexer=False, dequantise_all=False)
    names = {s.tensor.name: s.target.format(0) for s in plan.steps if s.form == "quantised"}
    hf: dict[str, str] = {target.removesuffix("weight"): cut(name) for name, target in names.items()}
    taker = Rank(0, ranks)
    pairs: Iterable[tuple[str, Any]] = gguf_quant_weights_iterator_multi([str(f) for f in header.files], names)
    for name, tensor in pairs:
        how = hf[name.removesuffix("qweight_type").removesuffix("qweight")]
        if tensor.dim() == 3:
            for number, expert in enumerate(tensor.unbind()):
                taker.take(name.replace(".experts.0.", f".experts.{number}."), expert, how)
        else:
            taker.take(name, tensor, how)
    return taker


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--place", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        header = write(Path(place) / "synthetic.gguf", args.gb)
        print(f"{header.bytes / 1e9:.2f} GB, {len(header.tensors)} tensors, torch {torch.__version__}")
        started = time.perf_counter()
        verdicts(read_header(header.path), Setup(tensor_parallel=8))
        print(f"header and all rules: {(time.perf_counter() - started) * 1e3:.0f} ms")
        print("| way | TP | calls | file GB/s | copied GB | seconds |\n|---|---|---|---|---|---|")
        for label, way, ranks in [
            ("ours, first pass", ours, 1),
            ("ours", ours, 1),
            ("ours", ours, 8),
            ("plugin's", plugins, 1),
            ("plugin's", plugins, 8),
        ]:
            started = time.perf_counter()
            taker = way(header, ranks)
            seconds = time.perf_counter() - started
            print(
                f"| {label} | {ranks} | {taker.calls} | {header.bytes / seconds / 1e9:.2f} | "
                f"{taker.bytes / 1e9:.2f} | {seconds:.2f} |"
            )
        print(f"largest resident set: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
