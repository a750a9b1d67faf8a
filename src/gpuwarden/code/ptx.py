"""PTX text: where it begins and ends among other bytes, and what it says (PTX ISA, directives)."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

import numpy as np

from gpuwarden.code.bounds import DEFAULT, KERNELS_TOLD, NAME_TOLD, Bounds
from gpuwarden.code.memory_search import Haystack
from gpuwarden.code.module import Kernel
from gpuwarden.pattern import pattern

MARK = b".version"
"""The directive that PTX text must begin with, after comments."""

ENTRY = b".entry"
HEAD_LIMIT_BYTES = 64 << 10
"""How far from ``.version`` its ``.target`` is looked for, and the text's beginning."""

_VERSION = pattern(rb"\.version\s+(\d{1,3}\.\d{1,3})(?=\s|/)")
_TARGET = pattern(rb"\.target\s+(?:sm|compute)_(\d{1,4}[af]?)\b")
# A comment without an end goes to the end, or many of them would be looked through again and again.
_COMMENT_SOURCE = rb"//[^\n]*+|/\*[^*]*+(?:\*(?!/)[^*]*+)*+(?:\*/|\Z)"
_BLANK = pattern(rb"(?:\s+|" + _COMMENT_SOURCE + rb")*+")
_NO_TEXT = pattern(rb"[\x00-\x08\x0e-\x1f\x7f]")
_ENTRY = pattern(rb"\.entry\s+([A-Za-z_$%%][\w$]{0,%d})" % NAME_TOLD)
_BUILT_WITH = pattern(rb"// *Cuda compilation tools, release [\d.]+, V([\d.]+)")
_NVVM = pattern(rb"// *Based on (NVVM [\d.]+|LLVM [\d.]+\w*)")
_COMMENT = pattern(_COMMENT_SOURCE)
_FROM_QUOTE = pattern(rb'"[^\n]*+')
# What is in quotes stays: a comment's mark in it must not hide the code behind it.
_COMMENT_OR_QUOTED = pattern(rb'("[^"\n]*+")|' + _COMMENT_SOURCE)
_DEBUG_SECTION = pattern(rb"\.section\s++\.debug_\w++\s*+\{[^}]*+(?:\}|\Z)")
# Only what is a whole line: code may stand behind these directives.
_DEBUG_LINE = pattern(
    rb"^[ \t]*+(?:\.loc[ \t]+\d+[ \t]+\d+[ \t]+\d+"
    rb"(?:, ?function_name [\w$]+, ?inlined_at \d+ \d+ \d+)?"
    rb'|\.file[ \t]+\d+[ \t]+"[^"\n]*"(?:, ?\d+, ?\d+)?)[ \t\r]*+$',
    re.MULTILINE,
)
# Names of what is static hold a hash of the source's path.
_OF_PATH = pattern(rb"(_INTERNAL_|_GLOBAL__N__|__nv_static_\d+__)[0-9a-f]{8}(?:_[0-9a-f]{8})?")
_BLANKS = b" \t\r\n\f\v"
SLASH, NEW_LINE = b"/\n"
WORDS_OF_PATHS = (b"_INTERNAL_", b"_GLOBAL__N__", b"__nv_static_")


class Head(NamedTuple):
    """What stands at the beginning of PTX text."""

    version: str
    target: str
    """``90a`` of ``sm_90a``."""


def head_at(data: memoryview | bytes, at: int, limit: int) -> tuple[Head | None, int]:
    """The head whose ``.version`` is at ``at``, and how many bytes were looked at for it."""
    window = bytes(data[at : min(limit, at + 64)])
    version = _VERSION.match(window)
    if version is None:
        return None, len(window)
    window = bytes(data[at : min(limit, at + 1024)])
    for size in (len(window), HEAD_LIMIT_BYTES):
        if size > len(window):
            window = bytes(data[at : min(limit, at + size)])
        blank = _BLANK.match(window, version.end())
        target = _TARGET.match(window, blank.end() if blank else version.end())
        if target is not None:
            return Head(version[1].decode(), target[1].decode()), target.end()
        if blank is not None and blank.end() < len(window) and window[blank.end()] != 0x2F:
            break
    return None, len(window)


def beginning(data: memoryview | bytes, at: int, floor: int) -> int:
    """Where the text begins whose ``.version`` is at ``at``: with the comments before it."""
    floor = max(floor, at - HEAD_LIMIT_BYTES)
    before = bytes(data[floor:at])
    cut = 0
    for no_text in _NO_TEXT.finditer(before):
        cut = no_text.end()
    lines = before[cut:].split(b"\n")
    start, position, inside = at, at + 1, False
    for number in range(len(lines) - 1, -1, -1):
        line, is_last = lines[number], number == len(lines) - 1
        position -= len(line) + 1
        stripped = line.strip(_BLANKS)
        if inside or stripped.endswith(b"*/"):
            inside = b"/*" not in stripped
        elif stripped and not stripped.startswith(b"//"):
            comment = line.find(b"//")
            if not is_last:
                start = position + (comment if comment >= 0 else len(line))
            break
        start = position
    return start if not inside else at


def ending(data: memoryview, at: int, limit: int) -> int:
    """Where the text ends: before the first byte that no text has."""
    for start in range(at, limit, 1 << 20):
        no_text = _NO_TEXT.search(data[start : min(limit, start + (1 << 20))])
        if no_text is not None:
            return start + no_text.start()
    return limit


def head_of(text: bytes | memoryview) -> Head | None:
    """The head of PTX text that begins with blanks and comments at most."""
    for size in (1024, HEAD_LIMIT_BYTES):
        blank = _BLANK.match(bytes(text[:size]))
        at = blank.end() if blank else 0
        if at < size:
            break
    return head_at(text, at, len(text))[0]


def kernels(
    text: bytes | memoryview, bounds: Bounds = DEFAULT, limit: int = KERNELS_TOLD
) -> tuple[int, tuple[Kernel, ...]]:
    """How many entries there are, and the first ``limit`` of them."""
    names: dict[bytes, None] = {}
    for at in _places(text, (ENTRY,)):
        entry = _ENTRY.match(text, at)
        if entry is not None and len(names) < bounds.kernels:
            names[entry[1]] = None
    told = tuple(Kernel(name=name.decode()) for name in list(names)[:limit])
    return len(names), told


def toolkit(text: bytes | memoryview) -> str:
    """What the comments say that it was made with."""
    beginning = bytes(text[:4096])
    built, nvvm = _BUILT_WITH.search(beginning), _NVVM.search(beginning)
    words = [f"nvcc {built[1].decode()}"] if built else []
    if nvvm:
        words.append(nvvm[1].decode())
    return ", ".join(words)


def code_digest(text: bytes | memoryview) -> str:
    """SHA-256 over the text without comments, blanks, debug information and hashes of paths."""
    text, blanks = bytes(text), _BLANKS
    if b"/" in text:
        if _has_marks_only(text):
            blanks += b"/"
        else:
            text = _without_comments(text)
    # Every .file has a quote, which is found fastest.
    if b'"' in text and Haystack(memoryview(text)).find(b".file", 0, len(text)) >= 0:
        text = _DEBUG_LINE.sub(b"", _DEBUG_SECTION.sub(b"", text))
    # fatbinary takes blanks out as well as comments.
    text = text.translate(None, blanks)
    digest, last = hashlib.sha256(b"ptx\0"), 0
    for at in _places(text, WORDS_OF_PATHS):
        of_path = _OF_PATH.match(text, at)
        if of_path is not None and of_path.start() >= last:
            digest.update(text[last : of_path.end(1)])
            last = of_path.end()
    digest.update(memoryview(text)[last:])
    return digest.hexdigest()


def _has_marks_only(text: bytes) -> bool:
    """Whether all slashes are two at a line's end: what older toolkits leave of comments."""
    slashes = (np.frombuffer(text, np.uint8) == SLASH).nonzero()[0]
    first, second = slashes[::2], slashes[1::2]
    if len(first) != len(second) or text.endswith(b"/") or not (first + 1 == second).all():
        return False
    return bool((np.frombuffer(text, np.uint8)[second + 1] == NEW_LINE).all())


def _without_comments(text: bytes) -> bytes:
    # An expression that begins with one certain byte is searched for twenty times as fast. It does
    # where no quote has a comment's mark behind it on its line, so that none can be in quotes.
    for line in _FROM_QUOTE.finditer(text):
        if b"//" in line[0] or b"/*" in line[0]:
            return _COMMENT_OR_QUOTED.sub(rb"\1", text)
    return _COMMENT.sub(b"", text)


def _places(text: bytes | memoryview, words: tuple[bytes, ...]) -> list[int]:
    find, end, found = Haystack(memoryview(text)).find, len(text), []
    for word in words:
        at = find(word, 0, end)
        while at >= 0:
            found.append(at)
            at = find(word, at + len(word), end)
    return sorted(found)
