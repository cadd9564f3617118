"""Where a ModelShape comes from: a GGUF header, or a built-in synthetic one."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from service.errors import UserError
from service.planning import glm5
from service.planning.shape import ModelShape, from_tensors
from service.planning.tensors import Tensor


@lru_cache(maxsize=16)
def model_shape(name: str) -> ModelShape:
    """`glm-5` and its siblings by name (synthetic headers with the real shapes), `demo` (the packaged
    SmolLM2-135M), anything else as a GGUF path."""
    if name in glm5.MIXES:
        mix = glm5.MIXES[name]
        return from_tensors(glm5.METADATA, glm5.tensors(mix), f"GLM-5 {mix.name} (synthetic header)")
    if name == "demo":
        from service.config import ModelConfig

        return shape_of_file(ModelConfig.model_validate({}).file())
    path = Path(name).expanduser()
    if not path.is_file():
        near = get_close_matches(name, glm5.MIXES, n=1)
        hint = f"did you mean --shape {near[0]}? " if near else ""
        raise UserError(f"no model file {name}: {hint}built-in shapes are {', '.join(glm5.MIXES)}")
    return shape_of_file(path)


def shape_of_file(path: Path) -> ModelShape:
    """The shape of a GGUF file (all parts of a split one). Raises UserError, or GgufError which is one."""
    from service.gguf.header import read_header
    from service.gguf.wire import STRING, GgufArray

    header = read_header(path)
    rows = [Tensor(info.name, info.shape, info.type.name) for info in header.tensors.values()]
    metadata: dict[str, object] = {}
    for key, value in header.metadata.items():
        if not isinstance(value, GgufArray):
            metadata[key] = value
        elif value.kind != STRING:  # no shape is in words
            metadata[key] = value.values()
    return from_tensors(metadata, rows, header.name)
