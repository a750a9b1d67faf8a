"""Values of Falco's output fields, and the ``label=value`` pairs of its text lines.

What is missing comes as null, ``"<NA>"`` or ``""``, all three even in one event; a path of which
Falco does not know the directory begins with ``<UNKNOWN>`` (falco.org, "Supported fields").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuwarden.pattern import pattern

TEXT_LIMIT: Final = 1024
LABEL_LIMIT: Final = 128
_UNKNOWN: Final = "<UNKNOWN>"
_PID_MAXIMUM: Final = 1 << 22
_UID_UNSET: Final = 0xFFFFFFFF
_DIGITS = pattern(r"-?[0-9]{1,20}")
_NUMBER_MAXIMUM: Final = 1 << 63

# A label begins the line or follows a blank, an opening parenthesis or the bar of newer rules.
_LABEL = pattern(r"(?:^|[\s(|])([a-z][a-z0-9_.]{0,40})=")
_SAID_TWICE: Final = object()


class Fields:
    """The fields of one event, by any of the names that they go by; notes what is missing.

    ``unread`` gets a reason for what was named and had no value, never for what was not named: a
    rule's own output decides what an event tells.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self._said_by = ""
        self.unread: dict[str, str] = {}

    def has(self, *prefixes: str) -> bool:
        """Whether any field's name begins like that."""
        return any(name.startswith(prefixes) for name in self._values)

    def value(self, field: str, *names: str) -> object | None:
        """The first of these that has a value."""
        for name in names:
            if name not in self._values:
                continue
            value = self._values[name]
            if value is _SAID_TWICE:
                self.unread[field] = f"{name} stands in the line twice"
            elif value is None or value in ("<NA>", ""):
                self.unread.setdefault(field, f"Falco had no {name}")
            elif isinstance(value, str) and value.startswith(_UNKNOWN):
                rest = value.removeprefix(_UNKNOWN)[:TEXT_LIMIT]
                self.unread[field] = f"Falco did not know the directory of {rest!r}"
            else:
                self.unread.pop(field, None)
                self._said_by = name
                return value
        return None

    def text(self, field: str, *names: str) -> str | None:
        """A text, bounded; a number is one too."""
        value = self.value(field, *names)
        if isinstance(value, str):
            return value[:TEXT_LIMIT]
        number = whole_number(value)
        if number is not None:
            return str(number)
        if value is not None:
            self.unread[field] = f"{self._said_by} is not a text"
        return None

    def number(self, field: str, *names: str) -> int | None:
        """A whole number, as such or in digits."""
        value = self.value(field, *names)
        found = whole_number(value)
        if found is None and value is not None:
            self.unread[field] = f"{self._said_by} is not a number"
        return found

    def pid(self, field: str, *names: str) -> int | None:
        """A number that a process can have: Falco says -1 when it lost track of the process."""
        found = self.number(field, *names)
        if found is None:
            return None
        if not 0 < found <= _PID_MAXIMUM:
            self.unread[field] = f"{self._said_by} is {found}, which no process has"
            return None
        return found

    def uid(self, field: str, *names: str) -> int | None:
        """A user's number; -1 and 4294967295 both say -1, which for a loginuid means nobody."""
        found = self.number(field, *names)
        if found == _UID_UNSET:
            found = -1
        if found is not None and not -1 <= found < _UID_UNSET:
            self.unread[field] = f"{self._said_by} is {found}, which no user has"
            return None
        return found


def whole_number(value: object) -> int | None:
    """A whole number below 2^63, given as such or in digits; None for anything else."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) < _NUMBER_MAXIMUM else None


def pairs(message: str) -> dict[str, object]:
    """The ``label=value`` pairs of a message, each value up to the next label.

    Names and arguments in it are a process's own words and can hold a label themselves: one that
    comes twice with different values has none.
    """
    found: dict[str, object] = {}
    labels = []
    for match in _LABEL.finditer(message):
        labels.append(match)
        if len(labels) > LABEL_LIMIT:
            break
    for at, match in enumerate(labels[:LABEL_LIMIT]):
        end = labels[at + 1].start() if at + 1 < len(labels) else len(message)
        value = message[match.end() : end][:TEXT_LIMIT].strip(" \t\r\n|")
        # The parenthesis that closes the list, or that one around a pair, is not of the value.
        unopened = value.count(")") - value.count("(")
        while unopened > 0 and value.endswith(")"):
            value, unopened = value[:-1].rstrip(), unopened - 1
        if match[1] in found and found[match[1]] != value:
            found[match[1]] = _SAID_TWICE
        else:
            found[match[1]] = value
    return found
