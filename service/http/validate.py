"""A JSON object against a request model: the model, or the one BadRequest that helps most."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.errors import BadRequest, UnsupportedField
from service.http.schema import Strict

Model = TypeVar("Model", bound=Strict)


def validate(model: type[Model], raw: dict[str, Any]) -> Model:
    """Check `raw` against `model`; `raw` loses refused keys that are null or an empty list. Raises BadRequest naming
    the field."""
    for name in model.refused.keys() & raw.keys():
        if raw[name] not in (None, []):
            raise UnsupportedField(f"the field {name!r} is refused: {model.refused[name]}", param=name)
        del raw[name]
    if raw.get("store") is True:
        raise UnsupportedField("store=true is refused: answers are never stored", param="store")
    if isinstance(raw.get("modalities"), list) and "audio" in raw["modalities"]:
        raise UnsupportedField("modalities may only be ['text']: this service writes text only", param="modalities")
    for name in raw:
        if name not in model.model_fields:
            known = list(model.model_fields)
            raise UnsupportedField(f"unknown field {name[:64]!r}{nearest(name, known)}", param=name[:64])
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_context=True), raw, model) from None


def extras(model: BaseModel) -> Iterator[str]:
    """Paths (without indices) of the unknown keys that loose models in `model` took, null ones left out."""
    yield from (name[:64] for name, value in (model.model_extra or {}).items() if value is not None)
    for name in type(model).model_fields:
        value = getattr(model, name)
        for inside in value if isinstance(value, list) else (value,):
            if isinstance(inside, BaseModel):
                yield from (f"{name}.{path}" for path in extras(inside))


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _explain(errors: list[ErrorDetails], raw: dict[str, Any], model: type[BaseModel]) -> BadRequest:
    """One error from many: a wrong `type` first (the rest follows from it), else the deepest, since of a union's
    branches the one that came furthest is the one that was meant."""
    found = [(_path(error, raw), error) for error in errors]
    path, error = max(found, key=_helpfulness)
    where = _render(path)
    kind = error["type"]
    if kind == "extra_forbidden":
        name = str(path[-1])
        return UnsupportedField(f"unknown field {where!r}{nearest(name, _nested_names(model))}", param=where)
    if kind == "missing":
        return BadRequest(f"the field {where!r} is required", param=where)
    if kind in ("literal_error", "union_tag_invalid", "union_tag_not_found") and path and _is_part(path, error, raw):
        part = _at(path, raw)
        given = part.get("type") if isinstance(part, dict) else part
        return UnsupportedField(
            f"{where}: a part of type {str(given)[:64]!r} is refused: the model {str(raw.get('model'))[:128]!r} reads "
            "text only",
            param=where,
        )
    if kind == "union_tag_not_found":
        return BadRequest(f"{where}: the key {error['ctx']['discriminator']} is required", param=where or None)
    if kind == "union_tag_invalid":
        ctx = error["ctx"]
        return BadRequest(f"{where}: {ctx['discriminator']} must be one of {ctx['expected_tags']}", param=where or None)
    if kind == "value_error":
        message = str(error["ctx"]["error"])
    elif path[:1] == ("prompt",) and "prompt" in model.model_fields and kind.endswith("_type"):
        message = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    elif kind.endswith("_type"):
        expected = (_expected(e) for p, e in found if p == path and e["type"].endswith("_type"))
        message = "must be " + " or ".join(dict.fromkeys(expected))
    else:
        message = error["msg"].replace("Input should", "must", 1)
    return BadRequest(f"{where}: {message}" if where else message, param=where or None)


def _helpfulness(pair: tuple[tuple[str | int, ...], ErrorDetails]) -> tuple[int, int, int]:
    path, error = pair
    kind = error["type"]
    first = kind == "literal_error" and path[-1:] == ("type",)
    last = 2 if kind == "extra_forbidden" else 0 if kind.endswith("_type") else 1
    return first, len(path), last


def _expected(error: ErrorDetails) -> str:
    words = {
        "string_type": "a string",
        "int_type": "an integer",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "an array",
        "dict_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
        "none_required": "null",
    }
    return words.get(error["type"], error["msg"].replace("Input should be ", ""))


def _path(error: ErrorDetails, raw: Any) -> tuple[str | int, ...]:
    """The error's place in the client's own body: pydantic's loc without the names of union branches."""
    path: list[str | int] = []
    here: Any = raw
    last = len(error["loc"]) - 1
    for at, step in enumerate(error["loc"]):
        if isinstance(here, dict):
            inside = step in here and not (at < last and _is_tag(here, step, error["loc"][at + 1]))
        else:
            inside = isinstance(here, list) and isinstance(step, int) and 0 <= step < len(here)
        if inside:
            here = here[step]
        elif not (at == last and error["type"] == "missing"):
            continue
        path.append(step)
    return tuple(path)


def _is_tag(here: dict[Any, Any], step: str | int, following: str | int) -> bool:
    """Whether `step`, though a key, names a union branch: the next step is a key here and cannot be one below."""
    below = here[step]
    return not isinstance(below, (dict, list)) and following in here


def _render(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in path).lstrip(".")


def _is_part(path: tuple[str | int, ...], error: ErrorDetails, raw: dict[str, Any]) -> bool:
    if path[0] not in ("messages", "input") or not {"content", "output"} & set(path):
        return False
    here = _at(path, raw)
    kind = here.get("type") if isinstance(here, dict) else here
    return isinstance(kind, str) and kind not in ("text", "refusal", "input_text", "output_text")


def _at(path: tuple[str | int, ...], raw: Any) -> Any:
    here: Any = raw
    for step in path:
        here = here[step]
    return here


def _nested_names(model: type[BaseModel]) -> list[str]:
    names: set[str] = set()
    for definition in model.model_json_schema().get("$defs", {}).values():
        names |= definition.get("properties", {}).keys()
    return sorted(names)
