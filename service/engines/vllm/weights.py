"""Tensor data from GGUF files, one tensor at a time: mapped, read ahead, and dropped when done.

A rank that takes a slice of a tensor touches only the pages of that slice. Nothing is copied for quantised weights.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as T

from service.gguf.header import GgufHeader, TensorInfo
from service.gguf.plan import FLOATS, Step

Named = tuple[str, torch.Tensor]
_READ_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of the file(s) consumed so far, of all that will be."""

    done: int
    total: int
    seconds: float

    @property
    def eta_s(self) -> float | None:
        return self.seconds * (self.total - self.done) / self.done if self.done else None

    @property
    def gb_per_s(self) -> float:
        return self.done / self.seconds / 1e9 if self.seconds else 0.0


class TensorFiles:
    """The data of a header's tensors. Use as a context manager; arrays it gave are invalid afterwards."""

    def __init__(self, header: GgufHeader) -> None:
        self._fds = [os.open(file, os.O_RDONLY) for file in header.files]
        # Private mappings: torch wants writable memory and nobody writes to it.
        self._maps = [mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) for fd in self._fds]
        # A file that shrank since its header was read would fault inside a copy, where no error can be raised.
        for fd, size, path in zip(self._fds, header.file_bytes, header.files, strict=True):
            if os.fstat(fd).st_size != size:
                raise ValueError(f"{path} changed its size after its header was read")

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)
        # The mappings go with the last array that looks into them.
        self._maps.clear()

    def raw(self, tensor: TensorInfo) -> np.ndarray[Any, Any]:
        """Bytes of the rows: uint8 (..., row_bytes), outermost dimension first. A view of the file."""
        flat = np.frombuffer(self._maps[tensor.file], np.uint8, tensor.bytes, tensor.offset)
        return flat.reshape(*tensor.numpy_shape[:-1], tensor.row_bytes)

    def will_need(self, tensor: TensorInfo) -> None:
        os.posix_fadvise(self._fds[tensor.file], tensor.offset, tensor.bytes, os.POSIX_FADV_WILLNEED)

    def done_with(self, tensor: TensorInfo) -> None:
        """Give the pages back to the page cache, so that a process's own memory stays small."""
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, start, end - start)


def dequantise(raw: np.ndarray[Any, Any], kind: T) -> torch.Tensor:
    """uint8 (..., row_bytes) to values (..., columns): float32, or the file's own type where it is a float."""
    if kind in (T.F32, T.F16):
        return torch.from_numpy(raw.view(np.float32 if kind == T.F32 else np.float16))
    if kind == T.BF16:
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(gguf.quants.dequantize(raw, kind))


def to_q8_0(values: torch.Tensor) -> torch.Tensor:
    """(..., columns) to Q8_0 bytes (..., columns / 32 * 34): per 32 values a half-precision scale and 32 int8."""
    blocks = values.float().reshape(*values.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    steps = blocks * inverse
    # Halves away from zero, as ggml rounds them.
    quants = (steps.abs() + 0.5).floor().copysign(steps).to(torch.int8).view(torch.uint8)
    return torch.cat([scale.half().view(torch.uint8), quants], -1).flatten(-2)


def rebuild_kv_b(k_b: torch.Tensor, v_b: torch.Tensor) -> torch.Tensor:
    """(heads, kv_lora, nope) and (heads, v_head, kv_lora) to kv_b_proj's (heads * (nope + v_head), kv_lora)."""
    return torch.cat([k_b.float().transpose(1, 2), v_b.float()], 1).flatten(0, 1)


def stream(
    files: TensorFiles, steps: Iterable[Step], total: int, report: Callable[[Progress], None] | None = None
) -> Iterator[Named]:
    """Names and tensors as vLLM's loaders take them. A quantised tensor comes as its type, then its bytes; experts
    come as one stack where nothing has to be computed, else one by one, so that memory stays bounded by one expert."""
    queue = list(steps)
    started, done = time.monotonic(), 0
    for index, step in enumerate(queue):
        for ahead in queue[index + 1 : index + 1 + _READ_AHEAD]:
            files.will_need(ahead.tensor)
        yield from _step(files, step)
        for tensor in (step.tensor, step.partner):
            if tensor is not None:
                files.done_with(tensor)
        done += step.bytes
        if report is not None:
            report(Progress(done, total, time.monotonic() - started))


def _step(files: TensorFiles, step: Step) -> Iterator[Named]:
    tensor, raw = step.tensor, files.raw(step.tensor)
    if step.partner is not None:
        k_b = dequantise(raw, tensor.type)
        yield step.target, rebuild_kv_b(k_b, dequantise(files.raw(step.partner), step.partner.type))
    elif step.form == "dequantised":
        if not step.experts:
            yield step.target, dequantise(raw, tensor.type).reshape(tensor.numpy_shape)
        elif tensor.type in FLOATS:
            yield step.target.format(0), dequantise(raw, tensor.type)
        else:
            for number, expert in enumerate(raw):
                yield step.target.format(number), dequantise(expert, tensor.type)
    elif step.form == "q8_0":
        yield _named(step.target.format(0), "qweight_type"), torch.tensor(int(T.Q8_0))
        for number, expert in enumerate(raw):
            yield _named(step.target.format(number), "qweight"), to_q8_0(dequantise(expert, tensor.type))
    else:
        # An expert's number stands for the whole stack: vLLM's loader takes a 3-D tensor as all experts at once.
        target = step.target.format(0) if step.experts else step.target
        yield _named(target, "qweight_type"), torch.tensor(int(tensor.type))
        yield _named(target, "qweight"), torch.from_numpy(raw)


def _named(target: str, kind: str) -> str:
    assert target.endswith(".weight"), target
    return target.removesuffix("weight") + kind
