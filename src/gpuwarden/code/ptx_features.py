"""What the entries and functions of PTX text are like, in numbers, when there is only PTX.

PTX comes before register allocation and optimisation: a rotation of 64 bits is two shifts there, a
three-input XOR is two XORs, and moves and conversions are everywhere. So the numbers are not those
of machine code: they are of statements but moves, conversions and floating point, and a pair of
shifts near each other by amounts that add up to their width counts as a rotation. One pass over the
text with patterns that never go back.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpuwarden.code.sass.groups import XOR_LIKE
from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

MOST_BYTES = 1 << 26
"""Of one text: CuPy has one of 36 MB."""
MOST_NUMBERS = 1 << 16
NARROW, WIDE = 128, 512
MASK = 0xFFFFFFFF
NEAR = 16
"""Statements of work within which two shifts can be the halves of one rotation."""

# A comment or string without an end goes to the end of the text.
_QUIET = pattern(rb'//[^\n]*+|/\*[^*]*+(?:\*(?!/)[^*]*+)*+(?:\*/|\Z)|"[^"\n]*+(?:"|\n|\Z)')
_MARK = pattern(rb"[{};]|\.(?:entry|func)\b")
_NAME = pattern(rb"\s*+(?:\([^()]*+\)\s*+)?+([A-Za-z_$%][\w$]*+)")
_BEFORE = pattern(rb"(?:\s*+(?:@\S++|[\w$%]++:(?!:)))*+")
_NUMBER = pattern(rb"(?<![\w.$%])-?+(?:0[xX][0-9a-fA-F]{1,16}+|[0-9]{1,20}+)U?+(?![\w.])")
_TABLE = pattern(rb"\.b(\d{1,2})\s++[\w$]++\s*+\[\d*+\]\s*+=\s*+\{([^{}]*+)")

FLOAT_TYPES = frozenset(b"f16 f16x2 bf16 bf16x2 f32 f32x2 f64 tf32 e4m3x2 e5m2x2".split())
ROTATING = frozenset((0x0321, 0x1032, 0x2103, 0x5432, 0x2107, 0x0765, 0x0123))
QUIET_WORDS = frozenset(b"mov cvt cvta ld st ldu prefetch bra ret exit".split())
"""Moves, conversions, memory and jumps: between the work, not the work."""
LEFT, RIGHT = b"shl", b"shr"

XOR, ROTATE, FUNNEL, SHIFT, LOGIC, ADD, MULTIPLY, OTHER = range(8)
PLAIN = OTHER
FLOAT, QUIET, DIRECTIVE, CLOSER = range(8, 12)
"""Left out of the work, and what is known only with its operands."""
LOOKED_AT = frozenset(b"lop3 shf prmt shl shr".split())
_KINDS = {
    b"xor": XOR, b"and": LOGIC, b"or": LOGIC, b"not": LOGIC, b"cnot": LOGIC, b"add": ADD,
    b"sub": ADD, b"addc": ADD, b"subc": ADD, b"mul": MULTIPLY, b"mad": MULTIPLY, b"madc": MULTIPLY,
}  # fmt: skip


class Function(Struct, frozen=True):
    """One entry or function with a body.

    ``statements`` counts all, ``floating`` and ``worked`` those of floating point and those of
    neither that nor moves, memory and jumps; the shares are of ``worked``. ``dense`` and
    ``dense_wide`` are the densest windows of 128 and 512 of them, by XOR and rotations, and
    ``dense_rotations`` that of 128 by rotations alone.
    """

    name: str
    statements: int
    floating: int
    worked: int
    xor: float
    rotate: float
    mixing: float
    add: float
    multiply: float
    dense: float
    dense_wide: float
    dense_rotations: float
    amounts: int
    body: bytes


def functions(text: bytes | memoryview) -> Iterator[Function]:
    """The functions of PTX text with their features. Errors: Malformed when it is too large."""
    if len(text) > MOST_BYTES:
        raise Malformed(f"PTX of {len(text):,} bytes, of which {MOST_BYTES:,} are read")
    plain = _QUIET.sub(b" ", bytes(text))
    for name, start, end in _bodies(plain):
        yield _function(name, plain[start:end])


def number_words(function: Function) -> npt.NDArray[np.uint32]:
    """The different 32-bit halves of the numbers in a function, up to ``MOST_NUMBERS``."""
    found: set[int] = set()
    for number in _NUMBER.finditer(function.body):
        value = _value(number[0])
        found.add(value & MASK)
        if value >> 32 not in (0, -1):
            found.add(value >> 32 & MASK)
        if len(found) >= MOST_NUMBERS:
            break
    return np.array(sorted(found), np.uint32)


def table_words(text: bytes | memoryview) -> npt.NDArray[np.uint32]:
    """The different 32-bit words of initialised tables, as far as ``MOST_NUMBERS`` each."""
    plain = _QUIET.sub(b" ", bytes(text[:MOST_BYTES]))
    found: list[npt.NDArray[np.uint32]] = []
    for table in _TABLE.finditer(plain):
        bits = int(table[1])
        if bits not in (8, 32, 64):
            continue
        values = [_value(one) for one in _NUMBER.findall(table[2], 0)[:MOST_NUMBERS]]
        mask = (1 << bits) - 1
        raw = b"".join((value & mask).to_bytes(bits // 8, "little") for value in values)
        found.append(np.frombuffer(raw, np.uint32, len(raw) // 4))
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.uint32)


def _bodies(plain: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of each function's body; braces of other directives are stepped over."""
    depth, name, start = 0, "", -1
    for mark in _MARK.finditer(plain):
        what = mark[0]
        if what == b"{":
            depth += 1
            if depth == 1 and name:
                start = mark.end()
        elif what == b"}":
            depth = max(depth - 1, 0)
            if depth == 0 and start >= 0:
                yield name, start, mark.start()
                name, start = "", -1
        elif depth == 0:
            name = ""
            if what != b";" and (found := _NAME.match(plain, mark.end())):
                name = found[1][:4096].decode()
    if start >= 0:
        yield name, start, len(plain)


def _function(name: str, body: bytes) -> Function:
    kinds = bytearray()
    statements = floating = 0
    amounts: set[int] = set()
    recent: dict[object, int] = {}
    seen: dict[bytes, int] = {}
    for statement in body.replace(b"{", b";").replace(b"}", b";").split(b";"):
        head, rest = _split(statement)
        if not head:
            continue
        kind = seen.get(head)
        if kind is None:
            kind = seen[head] = _kind_of(head)
        statements += kind != DIRECTIVE
        if kind <= PLAIN:
            kinds.append(kind)
        elif kind == FLOAT:
            floating += 1
        elif kind == CLOSER:
            kinds.append(_kind(head, rest.split(b","), len(kinds), recent, amounts))
    series = np.frombuffer(bytes(kinds), np.uint8)
    mixing = (series == XOR) | (series == ROTATE) | (series == FUNNEL)
    worked = len(series)

    def share(kind: int) -> float:
        return float((series == kind).sum()) / max(worked, 1)

    return Function(
        name=name,
        body=body,
        statements=statements,
        floating=floating,
        worked=worked,
        xor=share(XOR),
        rotate=share(ROTATE),
        mixing=float(mixing.sum()) / max(worked, 1),
        add=share(ADD),
        multiply=share(MULTIPLY),
        dense=_densest(mixing, NARROW),
        dense_wide=_densest(mixing, WIDE),
        dense_rotations=_densest(series == ROTATE, NARROW),
        amounts=len(amounts),
    )


def _split(statement: bytes) -> tuple[bytes, bytes]:
    """The opcode with its types, and the operands; without labels and a predicate."""
    parts = statement.split(None, 1)
    if parts and (parts[0][:1] == b"@" or b":" in parts[0]):
        before = _BEFORE.match(statement)
        parts = statement[before.end() :].split(None, 1) if before else []
    if not parts:
        return b"", b""
    return parts[0], parts[1] if len(parts) == 2 else b""


def _kind_of(head: bytes) -> int:
    """What an opcode does as far as it tells by itself."""
    word, *types = head.split(b".")
    if not word or not word.isalnum():
        return DIRECTIVE
    if word in QUIET_WORDS:
        return QUIET
    if not FLOAT_TYPES.isdisjoint(types):
        return FLOAT
    return CLOSER if word in LOOKED_AT else _KINDS.get(word, OTHER)


def _kind(
    head: bytes, operands: list[bytes], place: int, recent: dict[object, int], amounts: set[int]
) -> int:
    """What a statement does; ``recent`` holds where shifts were, ``place`` is this one's."""
    word, *types = head.split(b".")
    if word == b"lop3":
        table = _number_of(operands, 4)
        return XOR if table is not None and XOR_LIKE[table & 0xFF] else LOGIC
    if word == b"shf":
        if len(operands) < 4:
            return FUNNEL
        low, high, by = operands[1].strip(), operands[2].strip(), operands[3].strip()
        # The two halves of 64 bits, each shifted into the other, are a rotation too.
        recent[low, high, by] = place
        if recent.get((high, low, by), -NEAR) <= place - NEAR:
            return FUNNEL
        amounts.add((_number_of(operands, 3) or 0) % 64)
        return ROTATE
    if word == b"prmt":
        selector = _number_of(operands, 3)
        return ROTATE if selector in ROTATING else OTHER
    amount, bits = _number_of(operands, 2), _bits(types)
    if amount is not None:
        # Not of one register only: the compiler moves XORs through one of the two shifts.
        other = RIGHT if word == LEFT else LEFT
        recent[word, bits, amount] = place
        if recent.get((other, bits, bits - amount), -NEAR) > place - NEAR:
            amounts.add(amount)
            return ROTATE
    return SHIFT


def _number_of(operands: list[bytes], place: int) -> int | None:
    if place >= len(operands):
        return None
    operand = operands[place].strip()
    return _value(operand) if _NUMBER.fullmatch(operand) else None


def _bits(types: list[bytes]) -> int:
    """The width of an operation: 64 of ``b64``."""
    digits = types[-1][1:] if types else b""
    return int(digits) if digits.isdigit() and len(digits) < 4 else 0


def _value(number: bytes) -> int:
    return int(number.rstrip(b"U"), 16 if b"x" in number or b"X" in number else 10)


def _densest(mixing: npt.NDArray[np.bool_], width: int) -> float:
    sums = np.concatenate(([0], np.cumsum(mixing)))
    if len(mixing) <= width:
        return float(sums[-1]) / width
    return float((sums[width:] - sums[:-width]).max()) / width
