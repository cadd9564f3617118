"""Whatever schema is accepted, an answer that its grammar allows validates with jsonschema, which knows nothing of us.

The schemas are made at random from all keywords that are accepted; the answers are drawn from the grammar that the
engines' library makes of the canonical schema, and judged by the schema as the client wrote it.
"""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker, validators
from jsonschema.exceptions import ValidationError

from service.errors import BadRequest
from service.http.keywords import FORMATS
from service.http.schemas import fit_schemas
from tests.grammars import drawn

Json = dict[str, Any]


def _multiple_of(validator: Any, step: Any, value: Any, schema: Any) -> Any:
    """jsonschema divides floats, which finds that 0.3 is no multiple of 0.1."""
    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(step)):
        yield ValidationError(f"{value} is no multiple of {step}")


JUDGE = validators.extend(Draft202012Validator, {"multipleOf": _multiple_of})
# Those that it knows without further packages; its "time" is an older draft's, without a zone.
CHECKED = FormatChecker([name for name in FORMATS if name in FormatChecker.checkers and name != "time"])


def accepted(schema: Json) -> Json:
    """As engines are given it. Raises BadRequest."""
    raw = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    return fit_schemas(raw, "llamacpp")["response_format"]["json_schema"]["schema"]  # type: ignore[no-any-return]


def _real(text: str) -> Decimal | float:
    """Exactly, unless its exponent is beyond all bounds."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def judged(schema: Json, text: str) -> None:
    JUDGE(schema, format_checker=CHECKED).validate(json.loads(text, parse_float=_real))


KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
NAMES = ("a", "b", "cc", "d-e", "x y", "ä")
PATTERNS = (
    "^(foo|bar)x{2,3}$",
    "ab", "^a|b$", r"^\d{2}-\d\d$", r"^[a-z]+$", r"^[^a-z\s]{1,4}$", r"^(?:a|bc)*\.\!$", "x+$", "^a?b",
    r"^\$[0-9]+(?:\.[0-9]{2})?$", "^(a|)$", r"^[\w.-]+@[a-z]+$",
)  # fmt: skip
number = st.integers(-30, 30) | st.sampled_from([0.5, -0.25, 0.1, 1.75, -3.2, 12.125])
count = st.integers(0, 4)
value = st.sampled_from([None, True, False, 0, 1, -2, 1.5, "", "a", 'q"\\', "é", [], [1, "a"], {}, {"a": [None]}])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=fields)


def schemas() -> st.SearchStrategy[Json]:
    text = some(minLength=count, maxLength=count, pattern=st.sampled_from(PATTERNS), format=st.sampled_from(FORMATS))
    numbers = some(
        minimum=number,
        maximum=number,
        exclusiveMinimum=number,
        exclusiveMaximum=number,
        multipleOf=st.sampled_from([1, 2, 3, 7, 0.5, 0.25, 0.1, 0.01]),
    )
    typed = some(type=st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    simple = some(enum=st.lists(value, min_size=1, max_size=4), const=value)
    leaf = st.one_of(
        st.sampled_from(KINDS).map(lambda kind: {"type": kind}),
        text.map(lambda each: {"type": "string"} | each),
        numbers.map(lambda each: {"type": "number"} | each),
        numbers.map(lambda each: {"type": "integer"} | each),
        simple,
        st.tuples(typed, text, numbers).map(lambda each: each[0] | each[1] | each[2]),
        st.sampled_from(
            [{"$ref": "#/$defs/one"}, {"$ref": "#/definitions/two"}, {"$ref": "#/$defs/one", "minLength": 2}]
        ),
    )

    def grown(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
        several = st.lists(inner, min_size=1, max_size=3)
        anything = inner | st.booleans()
        arrays = some(items=anything, prefixItems=several, minItems=count, maxItems=count)
        objects = some(
            properties=st.dictionaries(st.sampled_from(NAMES), anything, max_size=3),
            required=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            additionalProperties=anything,
            patternProperties=st.dictionaries(st.sampled_from(["^a", "c$", "^x_"]), inner, min_size=1, max_size=1),
            minProperties=st.integers(0, 2),
            maxProperties=count,
        )
        return st.one_of(
            arrays.map(lambda each: {"type": "array"} | each),
            objects.map(lambda each: {"type": "object"} | each),
            some(anyOf=several, allOf=several, oneOf=several),
            st.tuples(inner, some(anyOf=several, allOf=several)).map(lambda each: each[0] | each[1]),
            st.tuples(arrays, objects).map(lambda each: each[0] | each[1]),
        )

    return st.tuples(st.recursive(leaf, grown, max_leaves=8), leaf, leaf).map(
        lambda each: {**each[0], "$defs": {"one": each[1]}, "definitions": {"two": each[2]}}
    )


# The last one: a dead end, which the trial of llama.cpp's engine calls "nothing fits it".
LIBRARY = (
    "nsatisfiable",
    "Unable to determine",
    "min/maxProperties only supported",
    "are not disjoint",
    "NoExtensionBias",
)
SEEN: Counter[str] = Counter()


@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 2**32))
def check_random_schemas(schema: Json, seed: int) -> None:
    try:
        fit = accepted(schema)
    except BadRequest:
        SEEN["refused"] += 1
        return
    for draw in range(4):
        try:
            text = drawn(fit, seed + draw)
        except ValueError as fault:
            # What nothing fits, and what only shows when schemas are joined, the library refuses itself: a 400 too.
            assert any(word in str(fault) for word in LIBRARY), fault
            SEEN["refused by the library"] += 1
            return
        SEEN["endless" if text is None else "judged"] += 1
        if text is not None:
            judged(schema, text)


def test_answers_validate() -> None:
    SEEN.clear()
    check_random_schemas()
    assert SEEN["judged"] > 500, SEEN
