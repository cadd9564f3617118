"""Whether quantised weights can be computed with here."""

from __future__ import annotations


def quantised_kernels() -> bool:
    """False on CPUs: vllm-gguf-plugin has no kernels for them, so every weight is dequantised while it is loaded."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()
