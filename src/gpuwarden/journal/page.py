"""The journal and its verification as text for a person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpuwarden.journal.entry import Entry, Who
from gpuwarden.journal.verification import Verification
from gpuwarden.outputs.sheet import Sheet, cut, pad
from gpuwarden.outputs.words import escape, moment

NARROWEST, WIDE = 60, 120
"""From ``WIDE`` columns on, subject and outcome stand beside the rest."""
WIDTHS = (6, 21, 24, 16)
VALUE_LIMIT = 200
STAGES = {"fact": "", "intent": " (intent)", "done": ": done", "failed": ": failed"}


def entries_text(
    entries: Sequence[Entry], told: Verification, *, left_out: int, width: int, colour: bool
) -> str:
    """A table, the newest last."""
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    if left_out:
        sheet.add(f"{left_out} older entries are not shown.")
    if entries:
        last = "ABOUT, AND WHAT CAME OF IT" if sheet.width >= WIDE else ""
        sheet.add(_row("NO", "TIME", "ACTION", "BY", last), style="dim")
    for entry in entries:
        _add(sheet, entry)
    if not entries:
        none = "no entry" if not told.entries else "no entry since then"
        sheet.add(f"{told.path}: {none}")
    return sheet.text()


def _add(sheet: Sheet, entry: Entry) -> None:
    number = "" if entry.of is None else f" ({entry.of})"
    lead = _row(
        str(entry.number),
        moment(entry.time_ns),
        f"{entry.action}{STAGES[entry.stage]}{number}",
        _who(entry.who),
    )
    style = "red" if entry.stage == "failed" else ""
    about, outcome = _subject(entry), entry.outcome
    hang = sum(WIDTHS)
    if sheet.width < WIDE:
        hang = WIDTHS[0]
        sheet.add(lead.rstrip(), style=style)
    elif about:
        sheet.add(lead + about, hang=hang, style=style)
        about = ""
    else:
        sheet.add(lead + outcome, hang=hang, style=style)
        outcome = ""
    for text in filter(None, (about, outcome)):
        sheet.add(text, indent=hang)


def _row(*cells: str) -> str:
    """Columns of fixed widths; each but the last is cut to its own."""
    texts = [escape(cell) for cell in cells]
    fixed = zip(texts, WIDTHS, strict=False)
    return "".join(pad(cut(text, size - 1), size) for text, size in fixed) + "".join(texts[4:])


def _who(who: Who) -> str:
    if who.by == "watch":
        return "watch"
    login = "" if who.loginuid is None else f" login {who.loginuid}"
    return (f"{who.sudo_user}? " if who.sudo_user else "") + f"uid {who.uid}{login}"


def _subject(entry: Entry) -> str:
    return ", ".join(
        f"{name} {_value(value)}"
        for name, value in entry.subject.items()
        if (name, value) != ("boot_id", entry.boot_id)
    )


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return cut(text, VALUE_LIMIT)


def verification_text(told: Verification, *, width: int, colour: bool) -> str:
    """Whether it is whole, and every place where it is not."""
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    count = f"{told.entries} {'entry' if told.entries == 1 else 'entries'}"
    if told.is_sound:
        signed = f", {told.signed} signed by a trusted key" if told.checked_signatures else ""
        sheet.add(f"{told.path}: {count}{signed}: as they were written", style="green")
    else:
        sheet.add(f"{told.path}: DOES NOT VERIFY ({count})", style="bold red")
    for problem in told.problems:
        sheet.add(str(problem), indent=2, hang=2)
    if told.more_problems:
        sheet.add(f"and {told.more_problems} more", indent=2)
    if told.head is not None:
        sheet.add(f"head {told.head}", indent=2)
        if told.head.signed_by:
            sheet.add(f"signed by {told.head.signed_by}", indent=2)
    _notes(sheet, told.notes)
    return sheet.text()


def _notes(sheet: Sheet, notes: Iterable[str]) -> None:
    for note in notes:
        sheet.add(f"note: {note}", indent=2, hang=6)
