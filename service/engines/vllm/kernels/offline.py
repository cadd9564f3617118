"""Compile the kernels where there is no GPU, and read what they need of one: registers, spills, shared memory.

The launchers run on meta tensors, with `Recorder` in the kernels' place.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from service.engines.vllm.kernels.choose import LinearTile, MoeTile
from service.engines.vllm.kernels.linear import COUNTERS, launch_linear
from service.engines.vllm.kernels.linear_device import linear_kernel
from service.engines.vllm.kernels.moe import Kernels, launch
from service.engines.vllm.kernels.repack import AFFINE5, SIGNED6, SIGNED8, TABLE4, Packed

SHARED_LIMIT = {90: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory a block may use, by compute capability (CUDA programming guide, compute capabilities)."""

TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs of a multiprocessor."""

    kernel: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    tensor_core: str

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED_LIMIT[self.capability] and self.registers <= 255


@dataclass
class Recorder:
    """Stands in a launcher where a kernel would: `[grid](args)` compiles it for `capability` and notes resources."""

    kernel: Any
    capability: int
    found: list[Resources] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {k: kwargs.pop(k) for k in ("num_warps", "maxnreg") if k in kwargs}
        bound = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = bound[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(i,)] = value
                continue
            whole = isinstance(value, int)
            signature[parameter.name] = TYPES[value.dtype] if torch.is_tensor(value) else "i32" if whole else "fp32"
            if torch.is_tensor(value) or (whole and value % 16 == 0 and not parameter.do_not_specialize):
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        registers, spills = _usage(made.asm["ptx"], made.asm["cubin"])
        ptx = made.asm["ptx"]
        core = "wgmma" if "wgmma" in ptx else "mma.sync" if "mma.sync" in ptx else "none"
        name = self.kernel.fn.__name__
        shared = made.metadata.shared
        self.found.append(
            Resources(name, self.capability, registers, spills, shared, options.get("num_warps", 4), core)
        )


def _usage(ptx: str, cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of local memory a thread) of the one kernel in `cubin`."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert numbers is not None, text
    return int(numbers[1]), int(numbers[2])


def meta_packed(form: int, n: int, k: int, experts: int = 1) -> Packed:
    """A Packed without data, for launchers that only compile."""
    kb, rows = k // 64, -(-n // 64) * 64

    def plane(pieces: int) -> torch.Tensor:
        return torch.empty(experts, pieces, rows, 32, dtype=torch.uint8, device="meta")

    scales = torch.int32 if form in (SIGNED8, TABLE4) else torch.int64
    high = plane(kb // 4 if form == AFFINE5 else kb // 2 if form == SIGNED6 else 0)
    low = plane(2 * kb if form == SIGNED8 else kb)
    return Packed(form, n, k, 1.0, low, high, torch.empty(experts, kb, rows, dtype=scales, device="meta"))


def linear_resources(form: int, n: int, k: int, m: int, tile: LinearTile, capability: int) -> list[Resources]:
    recorder = Recorder(linear_kernel, capability)
    launch_linear_with(recorder, form, n, k, m, tile)
    return recorder.found


def launch_linear_with(kernel: Any, form: int, n: int, k: int, m: int, tile: LinearTile) -> None:
    """Call the linear launcher on meta tensors with `kernel` in the kernel's place."""
    x, out, counters = _meta(m, k), _meta(m, n), _meta(COUNTERS, dtype=torch.int32)
    launch_linear(kernel, x, meta_packed(form, n, k), out, counters, tile)


def moe_resources(
    forms: tuple[int, int], experts: int, inner: int, hidden: int, m: int, top_k: int, tile: MoeTile, capability: int
) -> list[Resources]:
    base = Kernels()
    names = ("prepare", "w13_pair", "w13_group", "w2_pair", "w2_group", "sum")
    recorders = {name: Recorder(getattr(base, name), capability) for name in names}
    launch_moe_with(Kernels(**recorders), forms, experts, inner, hidden, m, top_k, tile)
    return [r for recorder in recorders.values() for r in recorder.found]


def launch_moe_with(
    kernels: Kernels, forms: tuple[int, int], experts: int, inner: int, hidden: int, m: int, top_k: int, tile: MoeTile
) -> None:
    """Call the experts' launcher on meta tensors with `kernels`."""
    w13, w2 = meta_packed(forms[0], 2 * inner, hidden, experts), meta_packed(forms[1], hidden, inner, experts)
    weights, ids = _meta(m, top_k, dtype=torch.float32), _meta(m, top_k, dtype=torch.int32)
    counters = _meta(COUNTERS, dtype=torch.int32)
    launch(kernels, _meta(m, hidden), w13, w2, weights, ids, None, counters, _meta(m, hidden), tile)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")
