"""One entry of the journal: what it says, its line of bytes, its hash, its signature.

A line is one JSON object in printable ASCII, its fields in the order of ``Entry``, without blanks:

    {"bytes":B,"number":N,"previous":"P",…,"signed_by":"K","signature":"S","hash":"H"}⏎

    B   how many bytes of the line follow the comma after it, the newline not counted
    P   the hash of the entry before, 64 zeros for the first
    S   ed25519 over the bytes of the line before ``,"signature":"``; empty when it is not signed
    H   SHA-256 of the bytes of the line before ``,"hash":"``, as 64 hexadecimal digits

So a hash covers everything before it, the signature too, and a line that was cut off while it was
written is shorter than it says.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Final, Literal

import msgspec

from gpuwarden.errors import Malformed, UsageError
from gpuwarden.model import Fact
from gpuwarden.pattern import pattern

LINE_LIMIT_BYTES = 64 << 10
BEGIN = b'{"bytes":'
FIRST_PREVIOUS = "0" * 64
SUBJECT_LIMIT_BYTES = 16 << 10
TEXT_LIMIT = 1024
OUTCOME_LIMIT = 2048
ITEMS_LIMIT = 64
DEPTH_LIMIT = 6
LEFT_OUT_LIMIT = 16

SET_ASIDE: Final = "set-aside"
"""The action of an entry that says which bytes before it are no entry."""

Stage = Literal["fact", "intent", "done", "failed"]
"""``intent`` is written before something is tried, ``done`` or ``failed`` after it."""
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, msgspec.Meta(pattern=r"^(?:[0-9a-f]{128})?\Z")]

_WORD = pattern(r"[a-z][a-z0-9-]{0,31}")
_HEAD = pattern(r"([1-9][0-9]{0,17}):([0-9a-f]{64})")
_LENGTH = pattern(rb'\{"bytes":([1-9][0-9]{0,4}),')
_END = pattern(rb'"hash":"[0-9a-f]{64}"\}')
_CUT_LENGTH = pattern(rb'\{"bytes":(?:[1-9][0-9]{0,4})?')
_PRINTABLE = pattern(rb"[\x20-\x7e]+")
_HASH_BYTES = len(',"hash":""}') + 64
_SIGNATURE_BYTES = len(',"signature":""')


class Who(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """Who asked. ``uid`` and ``loginuid`` are the kernel's; ``sudo_user`` is only claimed."""

    by: Literal["command", "watch"] = "command"
    uid: int = 0
    loginuid: int | None = None
    """None: nobody logged in for it, or it could not be read."""
    sudo_user: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the journal, in the order of its fields."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    previous: Digest
    time_ns: int
    boot_id: str
    node: str
    tool: str
    action: str
    stage: Stage
    of: int | None
    """The number of the intent that this entry is the outcome of."""
    subject: dict[str, Any]
    outcome: str
    who: Who
    signed_by: str
    """The fingerprint of the key (``keys.fingerprint``); empty when it is not signed."""
    signature: Signature = ""
    hash: Digest = ""


class _Line(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bytes: int


class Head(Fact, frozen=True, kw_only=True):
    """The last entry: what a copy elsewhere must know to see that the journal was cut or changed.

    As text ``NUMBER:HASH``.
    """

    number: int
    hash: str
    signed_by: str = ""

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"


def parse_head(text: str) -> Head:
    """A head as ``NUMBER:HASH``. Errors: UsageError."""
    found = _HEAD.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--head {text[:90]}: expected NUMBER:HASH, with 64 hexadecimal digits",
            remedy="gpuwarden journal head",
        )
    return Head(number=int(found[1]), hash=found[2])


def checked_word(action: str) -> str:
    """The action as it is. Errors: ValueError when it is not a short word."""
    if not _WORD.fullmatch(action):
        raise ValueError(f"{action!r}: an action is a short word, such as hold-jobs")
    return action


def bounded_text(text: str, limit: int = TEXT_LIMIT) -> str:
    """At most ``limit`` characters; what is no character is spelt out, what was cut is said."""
    more = len(text) - limit
    kept = text[:limit].encode("utf-8", "backslashreplace").decode()
    return kept if more <= 0 else f"{kept}… and {more} more"


def bounded(subject: dict[str, Any]) -> dict[str, Any]:
    """A subject as an entry can hold it: plain values, short texts, few items, not deep.

    When all that is still too much, the last keys are named in ``left_out`` instead.
    """
    whole = _bounded(subject, DEPTH_LIMIT)
    kept: dict[str, Any] = {}
    left_out = []
    room = SUBJECT_LIMIT_BYTES
    for key, value in whole.items():
        size = len(_text({key: value}))
        if size > room:
            left_out.append(key)
            continue
        room -= size
        kept[key] = value
    return {**kept, "left_out": left_out[:LEFT_OUT_LIMIT]} if left_out else kept


def _bounded(value: Any, depth: int) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else bounded_text(hex(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (dict, list, tuple)):
        more = len(value) - ITEMS_LIMIT
        if not depth:
            return f"{len(value)} items, too deep"
        if isinstance(value, dict):
            pairs = list(value.items())[:ITEMS_LIMIT]
            kept = {bounded_text(str(k), 64): _bounded(v, depth - 1) for k, v in pairs}
            return kept if more <= 0 else {**kept, "more": more}
        items = [_bounded(one, depth - 1) for one in value[:ITEMS_LIMIT]]
        return items if more <= 0 else [*items, f"and {more} more"]
    return bounded_text(value if isinstance(value, str) else str(value))


def _text(document: Any) -> str:
    # Not msgspec, which leaves everything that is not ASCII as it is.
    return json.dumps(document, separators=(",", ":"))


def unsigned_bytes(entry: Entry) -> bytes:
    """The line up to the signature: what is signed."""
    fields = msgspec.to_builtins(entry)
    del fields["signature"], fields["hash"]
    fields.pop("bytes", None)
    rest = _text(fields)[1:-1]
    size = len(rest) + _SIGNATURE_BYTES + len(entry.signature) + _HASH_BYTES
    return f'{{"bytes":{size},{rest}'.encode()


def sealed(entry: Entry, sign: Any = None) -> tuple[Entry, bytes]:
    """The entry with its signature and hash, and its line without the newline.

    ``sign`` is a private key, or None. Errors: ValueError when it does not fit into a line.
    """
    if sign is not None:
        # Its length is part of what is signed.
        entry = msgspec.structs.replace(entry, signature="0" * 128)
        signature = sign.sign(unsigned_bytes(entry)).hex()
        entry = msgspec.structs.replace(entry, signature=signature)
    before = _before_hash(entry)
    entry = msgspec.structs.replace(entry, hash=hashlib.sha256(before).hexdigest())
    line = before + f',"hash":"{entry.hash}"}}'.encode()
    if len(line) > LINE_LIMIT_BYTES:
        raise ValueError(f"an entry of {len(line)} bytes; the most is {LINE_LIMIT_BYTES}")
    return entry, line


def _before_hash(entry: Entry) -> bytes:
    return unsigned_bytes(entry) + f',"signature":"{entry.signature}"'.encode()


def parse(line: bytes) -> Entry:
    """The entry of a line without its newline; whether its hash is right is ``hash_of``'s to say.

    Errors: Malformed.
    """
    length = _LENGTH.match(line)
    if length is None or len(line) > LINE_LIMIT_BYTES or not line.endswith(b'"}'):
        raise Malformed("no entry")
    if len(line) - length.end() != int(length[1]):
        raise Malformed("its length is not the one that it says")
    try:
        read = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"no entry: {error}") from error
    fields = {name: getattr(read, name) for name in Entry.__struct_fields__}
    entry = Entry(**fields)
    if _is_deeper(entry.subject, DEPTH_LIMIT):
        raise Malformed("its subject is nested too deep")
    try:
        written = _before_hash(entry) + f',"hash":"{entry.hash}"}}'.encode()
    except ValueError as error:
        raise Malformed(f"no entry: {error}") from error
    if written != line:
        raise Malformed("not in the form in which entries are written")
    return entry


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(one, depth - 1) for one in inner)


def hash_of(line: bytes) -> str:
    """What the hash of a line has to be."""
    return hashlib.sha256(line[:-_HASH_BYTES]).hexdigest()


def whole(line: bytes) -> Entry | None:
    """The entry of a line whose hash is right; None for anything else."""
    try:
        entry = parse(line)
    except Malformed:
        return None
    return entry if hash_of(line) == entry.hash else None


def is_cut_off(piece: bytes, number: int, previous: str) -> bool:
    """Whether the bytes are the beginning of the line of that entry, which has no end.

    A line with something changed in it is none: it has its length, or its end. (One that lost a
    piece from within its end may pass; then it counts as removed, which only a head shows.)
    """
    if not _PRINTABLE.fullmatch(piece) or len(piece) > LINE_LIMIT_BYTES:
        return False
    names = f',"number":{number},"previous":"{previous}",'.encode()
    length = _CUT_LENGTH.match(piece)
    if length is None:
        return BEGIN.startswith(piece)
    rest = piece[length.end() :]
    if not rest:
        return True
    digits = piece[len(BEGIN) : length.end()]
    if not digits or not (rest.startswith(names) or names.startswith(rest)):
        return False
    return len(rest) - 1 < int(digits) and not _END.search(piece)
