"""The markup of ``nvidia-smi -q -x`` dumps: elements of interest, whole, cut off or damaged.

Real dumps are not always XML: lists are unbalanced, names hold raw bytes, ``&`` and ``<``. A
conforming parser that recovers drops those bytes and closes the wrong elements, which moves
processes to another GPU; so the tags are scanned here. An end tag that closes nothing is passed
over, one that closes an outer element closes what is inside, and either is reported as damage.
There are no entities to expand, no DTD and no recursion.
"""

from __future__ import annotations

import re

from msgspec import Struct, field

from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

TAG_LIMIT = 500_000
DEPTH_LIMIT = 64
DAMAGE_LIMIT = 4

LOG = "nvidia_smi_log"
GPU = "gpu"
MIG = "mig_device"
PROCESS = "process_info"
ACCOUNTED = "accounted_process_info"
RECORDS = frozenset({LOG, GPU, MIG, PROCESS, ACCOUNTED})
POWER = tuple(
    f"{section}/{value}"
    for section in ("gpu_power_readings", "power_readings")
    for value in ("power_draw", "instant_power_draw", "average_power_draw")
)
_MEMORY = ("fb_memory_usage/total", "fb_memory_usage/reserved", "fb_memory_usage/used")
# The leaf elements that are read, by the record they belong to, as paths below it.
WANTED: dict[str, frozenset[str]] = {
    "": frozenset(),
    LOG: frozenset({"timestamp", "driver_version", "cuda_version", "attached_gpus"}),
    GPU: frozenset(
        {
            "product_name",
            "uuid",
            "minor_number",
            "addressing_mode",
            "accounting_mode",
            "mig_mode/current_mig",
            "pci/pci_bus_id",
            "fan_speed",
            "gpu_recovery_action",
            "gpu_reset_status/reset_required",
            *_MEMORY,
            "utilization/gpu_util",
            "utilization/memory_util",
            "temperature/gpu_temp",
            "processes",
            *POWER,
        }
    ),
    MIG: frozenset({"index", "uuid", "gpu_instance_id", "compute_instance_id", *_MEMORY}),
    PROCESS: frozenset(
        {
            "gpu_instance_id",
            "compute_instance_id",
            "pid",
            "type",
            "process_name",
            "used_memory",
        }
    ),
    ACCOUNTED: frozenset({"pid", "gpu_util", "max_memory_usage", "time", "is_running"}),
}
# Elements without children: another start tag inside one means that its own end is missing.
_LEAVES = WANTED[LOG] | WANTED[PROCESS] | WANTED[ACCOUNTED] | {"uuid", "minor_number"}

# At the beginning of a line only: in another form of dump a process can be called like a tag.
LOOKS_LIKE = pattern(
    r"^[ \t]*(?:<\?xml[^<>]{0,200}>\s{0,8}(?:<!DOCTYPE[^<>]{0,200}>\s{0,8})?)?"
    r"<(?:nvidia_smi_log|process_info|gpu id=|attached_gpus)",
    re.MULTILINE,
)
_MARKUP = pattern(
    r"(?P<block><!--|<!\[CDATA\[)"
    r"|<(?P<end>/?)(?P<name>[A-Za-z_][\w.-]{0,99})(?P<attributes>(?:\s[^<>]{0,500})?)/?>"
    r"|<[!?][A-Za-z][^<>]*>",
    re.ASCII,
)
_BLOCK_ENDS = {"<!--": "-->", "<![CDATA[": "]]>"}
_NAME_END = pattern(r"</process_name\s*>|(?=</?(?:process_info|used_memory|processes|gpu)\b)")
_REFERENCE = pattern(r"&(?:(lt|gt|amp|quot|apos)|#(\d{1,7})|#x([0-9A-Fa-f]{1,6}));")
_ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}


class Record(Struct):
    """One element of interest with its wanted leaves, and whether its end was seen."""

    tag: str
    depth: int
    attributes: str = ""
    values: dict[str, str] = field(default_factory=dict)
    inner: list[Record] = field(default_factory=list)
    closed: bool = False
    repeated: bool = False
    """One of its leaves is there twice; the first is kept."""

    def get(self, path: str) -> str | None:
        return self.values.get(path)

    def find(self, tag: str) -> list[Record]:
        return [record for record in self.inner if record.tag == tag]


class Scan(Struct, frozen=True):
    """What the scan of the tags found: the top record and how the document is damaged."""

    top: Record
    damage: tuple[str, ...]
    cut_off: bool


def unescaped(text: str) -> str:
    """Text with XML's own references replaced; anything else stays as it is printed."""
    if "&" not in text:
        return text

    def character(match: re.Match[str]) -> str:
        if match[1]:
            return _ENTITIES[match[1]]
        code = int(match[2]) if match[2] else int(match[3], 16)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            return match[0]
        return chr(code)

    return _REFERENCE.sub(character, text)


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.top = Record(tag="", depth=0)
        self.records = [self.top]
        self.stack: list[str] = []
        self.pieces: list[str] = []
        self.damage: list[str] = []
        # Ends that are known to be nowhere ahead, so that no search runs to the end twice.
        self.missing: set[str] = set()

    def damaged(self, before: str, after: str = "") -> None:
        if len(self.damage) < DAMAGE_LIMIT:
            line = self.text.count("\n", 0, self.position) + 1
            self.damage.append(f"{before} line {line}{after}")

    def path(self) -> str:
        return "/".join(self.stack[self.records[-1].depth :])

    def keep(self, path: str, value: str) -> None:
        record = self.records[-1]
        if path in WANTED[record.tag]:
            record.repeated |= path in record.values
            record.values.setdefault(path, value)

    def pop(self, *, closed: bool = True) -> None:
        record = self.records[-1]
        if len(self.stack) == record.depth:
            self.records.pop()
            record.closed = closed
        elif closed:
            # A leaf without its end is no value: half a number reads like another number.
            self.keep(self.path(), unescaped("".join(self.pieces)))
        self.stack.pop()
        self.pieces.clear()

    def block(self, start: str) -> None:
        end = _BLOCK_ENDS[start]
        found = -1 if end in self.missing else self.text.find(end, self.position)
        if found < 0:
            self.missing.add(end)
            self.damaged(f"{start} without its end on")
            return
        if start != "<!--":
            self.pieces.append(self.text[self.position : found])
        self.position = found + len(end)

    def end(self, name: str) -> None:
        if name not in self.stack:
            self.damaged(f"</{name}> closes nothing on")
            return
        while self.stack[-1] != name:
            self.damaged(f"<{self.stack[-1]}> is not closed before")
            self.pop()
        self.pop()

    def start(self, name: str, attributes: str, *, empty: bool) -> None:
        if name in RECORDS and name in self.stack:
            self.damaged(f"<{name}> begins inside another on")
            while name in self.stack:
                self.pop(closed=False)
        while self.stack and self.stack[-1] in _LEAVES:
            self.damaged(f"<{self.stack[-1]}> is not closed before")
            self.pop()
        self.pieces.clear()
        if len(self.stack) >= DEPTH_LIMIT:
            raise Malformed(f"an nvidia-smi dump nested deeper than {DEPTH_LIMIT} elements")
        self.stack.append(name)
        if name in RECORDS:
            record = Record(tag=name, depth=len(self.stack), attributes=attributes)
            self.records[-1].inner.append(record)
            self.records.append(record)
        if empty:
            self.pop()
        elif name == "process_name":
            self.process_name()

    def process_name(self) -> None:
        # A name may hold anything, tags too: it ends where the driver ends it.
        found = None if "name" in self.missing else _NAME_END.search(self.text, self.position)
        if found is None:
            self.missing.add("name")
            return
        self.pieces.append(self.text[self.position : found.start()])
        self.position = found.end()
        if not found[0]:
            self.damaged("<process_name> is not closed before")
        self.pop()

    def run(self) -> Scan:
        tags = 0
        while match := _MARKUP.search(self.text, self.position):
            tags += 1
            if tags > TAG_LIMIT:
                raise Malformed(f"an nvidia-smi dump with more than {TAG_LIMIT} tags")
            if self.stack:
                self.pieces.append(self.text[self.position : match.start()])
            self.position = match.end()
            name = match["name"]
            if match["block"]:
                self.block(match["block"])
            elif name is not None and match["end"]:
                self.end(name)
            elif name is not None:
                self.start(name, match["attributes"], empty=match[0].endswith("/>"))
        cut_off = bool(self.stack)
        while self.stack:
            self.pop(closed=False)
        return Scan(top=self.top, damage=tuple(self.damage), cut_off=cut_off)


def scan(text: str) -> Scan:
    """The records of a document. Errors: Malformed past ``TAG_LIMIT`` or ``DEPTH_LIMIT``."""
    return _Scanner(text).run()
