"""A sheet of text of a given width: wrapped by terminal cells, indented, coloured if wanted."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from gpuwarden.outputs.words import escape

# SGR codes (ECMA-48 8.3.117) of the few styles in use.
STYLES = {
    "bold": "1",
    "dim": "2",
    "green": "32",
    "yellow": "33",
    "red": "31",
    "bold red": "1;31",
}


def cells(text: str) -> int:
    """Columns that a text takes in a terminal: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.combining(character)
        else 2
        if unicodedata.east_asian_width(character) in ("W", "F")
        else 1
        for character in text
    )


def cut(text: str, width: int, *, keep: str = "start") -> str:
    """At most ``width`` cells; an ellipsis marks the end, or the beginning, that was cut off."""
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    kept = ""
    used = 1
    for character in text if keep == "start" else reversed(text):
        size = cells(character)
        if used + size > width:
            break
        used += size
        kept = kept + character if keep == "start" else character + kept
    return kept + "…" if keep == "start" else "…" + kept


def pad(text: str, width: int, *, right: bool = False) -> str:
    """The text filled up with blanks to ``width`` cells, on the left for ``right``."""
    blanks = " " * max(width - cells(text), 0)
    return blanks + text if right else text + blanks


def _broken(word: str, width: int) -> list[str]:
    """A word in pieces that fit, so that a hostile path cannot overflow a line."""
    pieces: list[str] = []
    rest = word
    while cells(rest) > width:
        piece = cut(rest, width + 1)[:-1] or rest[:1]
        pieces.append(piece)
        rest = rest[len(piece) :]
    return [*pieces, rest]


def wrap(text: str, width: int, hang: int = 0) -> list[str]:
    """Lines of at most ``width`` cells; all but the first start ``hang`` blanks in."""
    lines: list[str] = []
    line, used = "", 0
    for word in text.split(" "):
        for number, piece in enumerate(_broken(word, max(width - hang, 2))):
            size = cells(piece)
            gap = 1 if number == 0 and used else 0
            if used and (number > 0 or used + gap + size > width):
                lines.append(line)
                line, used = " " * hang + piece, hang + size
            else:
                line, used = f"{line}{' ' * gap}{piece}", used + gap + size
    return [*lines, line]


class Sheet:
    """Lines in the making; whatever is put in, nothing in it acts on the terminal."""

    def __init__(self, width: int, *, colour: bool) -> None:
        self.width = width
        self.colour = colour
        self._lines: list[str] = []

    def styled(self, text: str, style: str) -> str:
        """The text in a style, or as it is without colour."""
        if not self.colour or not style or not text:
            return text
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m"

    def blank(self) -> None:
        self._lines.append("")

    def add(self, text: str, *, indent: int = 0, hang: int = 0, style: str = "") -> None:
        """One paragraph, wrapped."""
        for line in wrap(escape(text), self.width - indent, hang):
            self._lines.append(" " * indent + self.styled(line.rstrip(), style))

    def lead(self, lead: str, text: str, *, indent: int = 0, hang: int = 0, style: str) -> None:
        """One paragraph of which the first words, ``lead``, are styled."""
        lines = wrap(lead + escape(text), self.width - indent, hang)
        for number, line in enumerate(lines):
            shown = line.rstrip()
            if number == 0 and shown.startswith(lead.rstrip()):
                mark = lead.rstrip()
                shown = self.styled(mark, style) + shown[len(mark) :]
            self._lines.append(" " * indent + shown)

    def columns(
        self,
        rows: Sequence[Sequence[str]],
        widths: Sequence[int],
        *,
        right: frozenset[int],
        styles: Sequence[str],
    ) -> None:
        """A table; ``styles`` colours the last column of each row."""
        for row, style in zip(rows, styles, strict=True):
            shown = [escape(cell) for cell in row]
            fitted = [pad(cell, widths[i], right=i in right) for i, cell in enumerate(shown[:-1])]
            self._lines.append(" ".join([*fitted, self.styled(shown[-1], style)]).rstrip())

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"
