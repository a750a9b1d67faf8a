"""What the code digest of PTX takes for a comment, against a reader of one byte after another."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwarden.code.ptx import code_digest

WORDS = ["//", "/*", "*/", "/", "*", '"', "\n", " ", "a", "bc"]


def plainly(text: str) -> str:
    """The text without comments; a quote that ends on its line is no place for one."""
    kept, at = [], 0
    while at < len(text):
        line_end = text.find("\n", at) % (len(text) + 1)
        closing = text.find('"', at + 1, line_end)
        if text[at] == '"' and closing >= 0:
            kept.append(text[at : closing + 1])
            at = closing + 1
        elif text.startswith("//", at):
            at = line_end
        elif text.startswith("/*", at):
            end = text.find("*/", at + 2)
            at = end + 2 if end >= 0 else len(text)
        else:
            kept.append(text[at])
            at += 1
    return "".join(kept)


@given(st.lists(st.sampled_from(WORDS), max_size=30).map("".join))
@example('/* " */ "a//b" c')
@example('"a" // b "c')
@example('" // a\n"b"')
def test_comments_are_what_a_plain_reader_takes_for_them(text: str) -> None:
    without = plainly(text)
    if not any(mark in without for mark in ("//", "/*")):
        # Else what is left would be read as a comment the second time.
        assert code_digest(text.encode()) == code_digest(without.encode())
    assert code_digest(text.encode()) != code_digest(f"{text}\nd".encode()) or "/*" in text


@pytest.mark.parametrize(
    "code", ['.pragma "a//b"; ret;', '/* " */ .pragma "a//b"; ret;', '.pragma "/*"; ret; // */']
)
def test_code_behind_a_mark_in_quotes_counts(code: str) -> None:
    assert code_digest(code.encode()) != code_digest(code.replace("ret", "exit").encode())
