"""Kubernetes objects and comments as YAML that every parser reads alike.

Texts that some version of YAML takes for a number, a date or a truth value are quoted.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final

import yaml

from gpuwarden.outputs.words import escape

WIDTH: Final = 100
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9./-]*", re.ASCII)
_WORDS_OF_YAML: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_FOLDS: Final = re.compile(r"[!-~]+( [!-~]+)*", re.ASCII)


class _Dumper(yaml.SafeDumper):
    """Texts quoted where they are not plainly words; lists below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None
    if len(text) > WIDTH - 20 and _FOLDS.fullmatch(text):
        style = ">"
    elif not _PLAIN.fullmatch(text) or text.lower() in _WORDS_OF_YAML:
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def comment(lines: Iterable[str]) -> str:
    """Lines as comments; what acts on a terminal or ends a line in them is escaped."""
    wrapped = (
        part
        for line in lines
        for part in textwrap.wrap(
            escape(line), WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False
        )
    )
    return "".join(f"# {line}".rstrip() + "\n" for line in wrapped)


def stream(objects: Sequence[dict[str, Any]]) -> str:
    """Documents, each begun by ``---``."""
    return "".join(
        "---\n" + yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=False)
        for one in objects
    )
