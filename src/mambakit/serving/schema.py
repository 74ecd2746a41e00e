"""Request bodies as JSON schemas: what the OpenAPI description shows is what is checked."""

import math
import re
import reprlib
from collections.abc import Callable
from typing import Any

from mambakit.serving.errors import ApiError, bad, unsupported

Schema = dict[str, Any]
NOT_BUILT = "x-not-built"

TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


class WrongKindError(ApiError):
    kinds: list[str]


def text(**bounds: Any) -> Schema:
    return {"type": "string", **bounds}


def integer(least: int, most: int | None = None, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most}), **more}


def number(**bounds: Any) -> Schema:
    return {"type": "number", **bounds}


def array(items: Schema, **bounds: Any) -> Schema:
    return {"type": "array", "items": items, **bounds}


def record(properties: dict[str, Schema], *required: str, more: bool = False) -> Schema:
    """An object; a key that is not listed is refused unless there may be `more`."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": more}
    return {**schema, "required": list(required)} if required else schema


def optional(schema: Schema) -> Schema:
    """`schema`, or null, which is the same as leaving it out."""
    if "type" in schema and "enum" not in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {**schema, "type": [*kinds, "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}


def not_built(*kinds: str, **bounds: Any) -> Schema:
    """What is known but does nothing here: only values that ask for nothing are taken."""
    return {"type": [*kinds, "null"], "description": "not supported by this build", NOT_BUILT: True, **bounds}


def check(value: Any, schema: Schema, name: str = "") -> None:
    """ApiError 400 that names the place where `value` is not what `schema` says."""
    if schema.get(NOT_BUILT):
        try:
            check(value, {**schema, NOT_BUILT: False}, name)
        except ApiError as error:
            raise unsupported(name) from error
        return
    # Beside a type it says what somebody else checks, who can put it better.
    if "anyOf" in schema and "type" not in schema:
        _check_any(value, schema["anyOf"], name)
        return
    kinds = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(TYPES[kind](value) for kind in kinds):
            raise _wrong_kind(value, name, kinds)
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        raise _wrong(value, name, "one of " + ", ".join(map(repr, schema["enum"])))
    if isinstance(value, str):
        _check_text(value, schema, name)
    elif isinstance(value, list):
        _check_array(value, schema, name)
    elif isinstance(value, dict):
        _check_object(value, schema, name)
    elif TYPES["number"](value):
        _check_number(value, schema, name)


def _check_any(value: Any, choices: list[Schema], name: str) -> None:
    complaints = []
    for choice in choices:
        try:
            check(value, choice, name)
            return
        except ApiError as error:
            complaints.append(error)
    # A complaint about what lies inside says more than one about the kind of the whole.
    inside = [one for one in complaints if not (isinstance(one, WrongKindError) and one.param == (name or None))]
    plain = [one for one in inside if not isinstance(one, WrongKindError)]
    if inside:
        raise (plain or inside)[0]
    raise _wrong_kind(
        value, name, [kind for one in complaints if isinstance(one, WrongKindError) for kind in one.kinds]
    )


def _check_text(value: str, schema: Schema, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad(f"{name} holds half of a surrogate pair, which is no character", name) from error
    if len(value) < schema.get("minLength", 0):
        raise bad(f"{name} is empty", name)
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        raise _wrong(value, name, f"what {schema['pattern']} matches")
    if len(value) > schema.get("maxLength", math.inf):
        raise bad(f"{name} has {len(value)} characters, at most {schema['maxLength']} are allowed", name)


def _check_number(value: float, schema: Schema, name: str) -> None:
    if not -math.inf < value < math.inf:
        raise _wrong(value, name, "a finite number")
    least, above, most = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    if least is not None and value < least:
        raise _wrong(value, name, f"at least {least}")
    if above is not None and value <= above:
        raise _wrong(value, name, f"above {above}")
    if most is not None and value > most:
        raise _wrong(value, name, f"at most {most}")


def _check_array(value: list[Any], schema: Schema, name: str) -> None:
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not least <= len(value) <= most:
        expected = f"at least {least}" if len(value) < least else f"at most {most}"
        raise bad(f"{name} has {len(value)} entries, expected {expected}", name)
    items = schema.get("items", {})
    if items.get("type") == "integer" and set(map(type, value)) == {int}:
        # Prompts are long: of whole numbers the least and the largest say it all.
        ends = {min(value), max(value)}
        if all(items.get("minimum", end) <= end <= items.get("maximum", end) for end in ends):
            return
    for place, one in enumerate(value):
        check(one, items, f"{name}[{place}]")


def _check_object(value: dict[str, Any], schema: Schema, name: str) -> None:
    dot = f"{name}." if name else ""
    known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    # What kind of thing it says it is comes first: one of another kind misses much that is not the point.
    for key in value.keys() & known.keys():
        if "enum" in known[key]:
            check(value[key], known[key], f"{dot}{key}")
    for key in schema.get("required", ()):
        if key not in value:
            raise bad(f"{dot}{key} is missing", f"{dot}{key}")
    if len(value) > schema.get("maxProperties", math.inf):
        raise bad(f"{name} has {len(value)} entries, at most {schema['maxProperties']} are allowed", name)
    for key, one in value.items():
        _check_text(key, schema.get("propertyNames", {}), f"a key of {name}" if name else "a key")
        if key in known:
            check(one, known[key], f"{dot}{key}")
        elif more is False:
            raise bad(
                f"{dot}{key[:100]} is not known here; it may be {', '.join(sorted(known)) or 'nothing'}", key[:100]
            )
        elif isinstance(more, dict):
            check(one, more, f"{dot}{key}")


def _wrong(value: Any, name: str, expected: str) -> ApiError:
    return bad(f"{name or 'the body'} is {reprlib.repr(value)}, expected {expected}", name or None)


def _wrong_kind(value: Any, name: str, kinds: list[str]) -> WrongKindError:
    kinds = list(dict.fromkeys(kinds))
    found = _wrong(value, name, " or ".join(kinds))
    error = WrongKindError(found.status, found.message, param=found.param)
    error.kinds = kinds
    return error
