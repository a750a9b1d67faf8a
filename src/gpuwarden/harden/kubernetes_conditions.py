"""Conditions on Kubernetes objects as data: each has a text in CEL, and is decided in Python too.

A path is ``variable.field.field``: its first name is bound by what stands around it. A field that
is missing makes a condition false, as ``has()`` does. Objects are as the API server hands them to
CEL: JSON without nulls. Source: the CEL language definition.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol

from msgspec import Struct

from gpuwarden.errors import Malformed

Bound = Mapping[str, Any]
"""Variable → its value."""


class Condition(Protocol):
    """Something that holds or does not."""

    @property
    def cel(self) -> str:
        """The condition as a CEL expression of type bool."""
        ...

    def holds(self, bound: Bound) -> bool:
        """The same in Python. Errors: Malformed, where CEL would fail on a value's type."""
        ...


TEXT_LIMIT: Final = 4096
"""No path, name or key is longer; what claims to be is not looked at, and said to be unread."""
_NOTHING = object()


def look_up(path: str, bound: Bound) -> Any:
    """The value at a path, or a marker that ``is_missing`` knows. Errors: Malformed."""
    name, *fields = path.split(".")
    value = bound[name]
    for field in fields:
        if not isinstance(value, Mapping):
            raise Malformed(f"{path}: not an object above '{field}'")
        value = value.get(field, _NOTHING)
        if value is _NOTHING:
            return _NOTHING
    return value


def is_missing(value: Any) -> bool:
    """Whether ``look_up`` found nothing."""
    return value is _NOTHING


def guard(path: str) -> str:
    """``has()`` for each step of a path; empty for a variable alone or one of the policy's own."""
    names = path.split(".")
    first = 2 if names[0] == "variables" else 1
    return "".join(f"has({'.'.join(names[:end])}) && " for end in range(first + 1, len(names) + 1))


def literal(text: str) -> str:
    """A text as a CEL string."""
    return json.dumps(text)


def raw(regex: str) -> str:
    """A regular expression as a raw CEL string. Errors: ValueError when it cannot be one."""
    if "'" in regex or "\n" in regex:
        raise ValueError(f"{regex!r} does not fit into a raw string")
    return f"r'{regex}'"


@lru_cache(maxsize=256)
def _compiled(regex: str) -> re.Pattern[str]:
    # In RE2 `$` is the end of the text; in Python it is also before a last newline.
    return re.compile(regex.replace("$", r"\Z"), re.ASCII)


def found(regex: str, value: Any, where: str) -> bool:
    """Whether a regular expression finds something, as CEL's ``matches``. Errors: Malformed."""
    if not isinstance(value, str):
        raise Malformed(f"{where}: not a text")
    if len(value) > TEXT_LIMIT:
        raise Malformed(f"{where}: longer than {TEXT_LIMIT} characters")
    return _compiled(regex).search(value) is not None


def items(value: Any, where: str) -> Sequence[Any]:
    """A list, or an object's keys. Errors: Malformed."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, list):
        return value
    raise Malformed(f"{where}: neither a list nor an object")


class Has(Struct, frozen=True):
    """The field is there."""

    path: str

    @property
    def cel(self) -> str:
        return guard(self.path).removesuffix(" && ")

    def holds(self, bound: Bound) -> bool:
        return not is_missing(look_up(self.path, bound))


class IsTrue(Struct, frozen=True):
    """The field is there and true."""

    path: str

    @property
    def cel(self) -> str:
        return f"{guard(self.path)}{self.path}"

    def holds(self, bound: Bound) -> bool:
        value = look_up(self.path, bound)
        if is_missing(value):
            return False
        if not isinstance(value, bool):
            raise Malformed(f"{self.path}: neither true nor false")
        return value


class Matches(Struct, frozen=True):
    """The text there holds something that the regular expression finds."""

    path: str
    regex: str

    @property
    def cel(self) -> str:
        return f"{guard(self.path)}{self.path}.matches({raw(self.regex)})"

    def holds(self, bound: Bound) -> bool:
        value = look_up(self.path, bound)
        return not is_missing(value) and found(self.regex, value, self.path)


class OneOf(Struct, frozen=True):
    """The text there is one of these."""

    path: str
    values: tuple[str, ...]

    @property
    def cel(self) -> str:
        return f"{guard(self.path)}{self.path} in [{', '.join(map(literal, self.values))}]"

    def holds(self, bound: Bound) -> bool:
        value = look_up(self.path, bound)
        return not is_missing(value) and value in self.values


class Listed(Struct, frozen=True):
    """The text there stands in a list variable of the policy."""

    path: str
    variable: str

    @property
    def cel(self) -> str:
        return f"{guard(self.path)}{self.path} in {self.variable}"

    def holds(self, bound: Bound) -> bool:
        value = look_up(self.path, bound)
        return not is_missing(value) and value in look_up(self.variable, bound)


class Same(Struct, frozen=True):
    """Two fields are there and hold the same text."""

    path: str
    other: str

    @property
    def cel(self) -> str:
        return f"{guard(self.path)}{guard(self.other)}{self.path} == {self.other}"

    def holds(self, bound: Bound) -> bool:
        value, other = look_up(self.path, bound), look_up(self.other, bound)
        return not is_missing(value) and not is_missing(other) and bool(value == other)


class Filled(Struct, frozen=True):
    """A list variable of the policy has something in it."""

    path: str

    @property
    def cel(self) -> str:
        return f"size({self.path}) > 0"

    def holds(self, bound: Bound) -> bool:
        return bool(look_up(self.path, bound))


class Some(Struct, frozen=True):
    """The condition holds of an element of the list, or of a key of the object."""

    path: str
    name: str
    """What an element is called within the condition."""
    condition: Condition

    @property
    def cel(self) -> str:
        return f"{guard(self.path)}{self.path}.exists({self.name}, {self.condition.cel})"

    def holds(self, bound: Bound) -> bool:
        value = look_up(self.path, bound)
        if is_missing(value):
            return False
        elements = items(value, self.path)
        return any(self.condition.holds({**bound, self.name: one}) for one in elements)


class SomeAmount(Struct, frozen=True):
    """The object has a resource of that name, and more than none of it.

    Quantities are numbers or texts; ``0``, ``0.0``, ``0Ki`` and ``0e3`` are none.
    """

    path: str
    regex: str

    @property
    def cel(self) -> str:
        return (
            f"{guard(self.path)}{self.path}.exists(q, q.matches({raw(self.regex)}) && "
            f"string({self.path}[q]).matches({raw(MORE_THAN_NONE)}))"
        )

    def holds(self, bound: Bound) -> bool:
        value = look_up(self.path, bound)
        if is_missing(value):
            return False
        if not isinstance(value, Mapping):
            raise Malformed(f"{self.path}: not an object")
        for key, amount in value.items():
            if not found(self.regex, key, self.path):
                continue
            if isinstance(amount, bool) or not isinstance(amount, int | str):
                raise Malformed(f"{self.path}: not a quantity")
            if found(MORE_THAN_NONE, str(amount), self.path):
                return True
        return False


MORE_THAN_NONE = r"^\+?[0.]*[1-9]"


class Both(Struct, frozen=True):
    """All of the conditions hold."""

    conditions: tuple[Condition, ...]

    @property
    def cel(self) -> str:
        return " && ".join(_within(one) for one in self.conditions)

    def holds(self, bound: Bound) -> bool:
        return all(one.holds(bound) for one in self.conditions)


class Either(Struct, frozen=True):
    """At least one of the conditions holds."""

    conditions: tuple[Condition, ...]

    @property
    def cel(self) -> str:
        return " || ".join(_within(one) for one in self.conditions)

    def holds(self, bound: Bound) -> bool:
        return any(one.holds(bound) for one in self.conditions)


class Not(Struct, frozen=True):
    """The condition does not hold."""

    condition: Condition

    @property
    def cel(self) -> str:
        return f"!({self.condition.cel})"

    def holds(self, bound: Bound) -> bool:
        return not self.condition.holds(bound)


def _within(condition: Condition) -> str:
    """A condition as a part of another one."""
    text = condition.cel
    return f"({text})" if " && " in text or " || " in text else text
