"""The entry point `vllm.general_plugins` -> glm5: vLLM calls `register` in each of its processes.

After it plain `vllm serve GLM-5-....gguf` works: the adapter loads the weights; config and tokenizer, which the file
does not hold in a form that vLLM reads, are made from its header beforehand.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

_DONE = "_glm5_done"


def register() -> None:
    """Idempotent. Raises RuntimeError for a vllm-gguf-plugin that cannot be cured."""
    import vllm_gguf_plugin
    from vllm.platforms import current_platform
    from vllm_gguf_plugin import weights_adapter

    from service.engines.vllm import patches
    from service.engines.vllm.adapter import adapters

    vllm_gguf_plugin.register()
    patches.apply()
    ours = adapters()
    registry = weights_adapter._ADAPTER_REGISTRY
    if ours[0] not in registry:
        registry[:0] = ours
    if current_platform.is_cuda():
        from service.engines.vllm.kernels import quant_method

        quant_method.register()
    _materialise_before_config()
    _follow_workers()


def _follow_workers() -> None:
    """A worker tells its steps, and on a GPU compiles its kernels as soon as it knows its layers."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.worker_base import WorkerBase

    from service.engines.vllm import progress

    original = WorkerBase.__init__
    if getattr(original, _DONE, False):
        return

    @wraps(original)
    def made(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        own = progress.journal(self.rank)
        if current_platform.is_cuda():
            from service.engines.vllm.kernels.loaded import compile_for

            progress.then(self, "load_model", compile_for, own)
        if own is not None:
            progress.follow(self, own)

    setattr(made, _DONE, True)
    WorkerBase.__init__ = made  # type: ignore[method-assign]


def _materialise_before_config() -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_model_config
    if getattr(original, _DONE, False):
        return

    @wraps(original)
    def create_model_config(self: Any, *given: Any, **named: Any) -> Any:
        model = self.model
        if isinstance(model, str) and model.endswith(".gguf") and Path(model).is_file():
            _complete(self, Path(model))
        return original(self, *given, **named)

    setattr(create_model_config, _DONE, True)
    EngineArgs.create_model_config = create_model_config  # type: ignore[method-assign]


def _complete(arguments: Any, model: Path) -> None:
    """Fill in what the command line left out for a local GGUF file."""
    import vllm.envs as envs
    from vllm.platforms import current_platform

    from service.engines.vllm.attention import choose_attention
    from service.gguf.header import read_header
    from service.gguf.materialise import linked_file, materialise

    if arguments.hf_config_path is not None or (model.parent / "config.json").is_file():
        return
    header = read_header(model)
    attention = choose_attention(header, "auto", arguments.max_model_len, on_cpu=current_platform.is_cpu())
    place = materialise(header, Path(envs.VLLM_CACHE_ROOT) / "glm5", attention)
    arguments.model = str(linked_file(place, header))
    arguments.hf_config_path = str(place)
    arguments.tokenizer = arguments.tokenizer or str(place)
    if arguments.served_model_name is None:
        arguments.served_model_name = [str(model)]
    speculative = arguments.speculative_config
    if isinstance(speculative, dict) and speculative.get("method") == "mtp" and "model" not in speculative:
        arguments.speculative_config = {**speculative, "model": arguments.model, "quantization": "gguf"}
