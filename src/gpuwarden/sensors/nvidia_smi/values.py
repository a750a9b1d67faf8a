"""The values that every form of nvidia-smi output prints alike, and the facts drafted from them.

Each ``*_of`` function takes the text as printed and returns ``(value, reason)``: the value is None
when the text is a placeholder or unreadable, and the reason then says so.
Source: nvidia-smi(1) and dumps of the drivers 384 to 595.
"""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from gpuwarden.errors import Malformed
from gpuwarden.model import AccountedProcess, ClientKind, Gap, Gpu, GpuClient, UtilisationSample
from gpuwarden.pattern import pattern

SENSOR = "nvidia_smi"
UNKNOWN_GPU = "unknown"
"""The ``Gpu.id`` of processes whose dump does not name their GPU."""
PROCESSES = "processes"
"""The key in ``Gpu.unread`` of a GPU whose process list could not be seen."""

NAME_LIMIT = 8192
PID_LIMIT = 1 << 22
"""The kernel's PID_MAX_LIMIT on 64-bit machines; pids are smaller."""
NUMBER_LIMIT = 1 << 62
GAP_LIMIT = 1000
GPU_LIMIT = 4096
BUSY_PERCENT = 10
BUSY_BYTES = 256 << 20

PLACEHOLDER = pattern(
    r"\[?(?P<word>N/A|Not Found|Not Supported|Not Available|Not Active|Unknown Error|Unknown"
    r"|Insufficient Permissions|No Permission|Function Not Found|ERR!|GPU is lost"
    r"|GPU requires reset|Reset Required|Requested functionality has been deprecated)\.?\]?",
    re.IGNORECASE,
)
_QUANTITY = pattern(r"(?P<number>-?\d{1,18}(?:\.\d{1,6})?)\s*(?P<unit>[A-Za-z%]{0,3})")
_SCALES = {"": 1 << 20, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "mb": 1 << 20, "gib": 1 << 30}
_CUT_OFF = pattern(r"(\d+)[A-Za-z]*\.{2,3}")
_PCI = pattern(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})"
    r"(?:\.(?P<function>[0-7]))?",
    re.IGNORECASE,
)
_CTIME = pattern(
    r"(?:[A-Z][a-z]{2} )?(?P<month>[A-Z][a-z]{2}) +(?P<day>\d{1,2}) "
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d) (?P<year>\d{4})"
)
_SLASHED = pattern(
    r"(?P<year>\d{4})[/-]?(?P<month>\d\d)[/-]?(?P<day>\d\d)[ T]"
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:\.(?P<fraction>\d{1,9}))?"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_KINDS: tuple[ClientKind, ...] = ("C", "G", "M")

ELSEWHERE = (
    "nvidia-smi found no such process: it ran in another pid namespace (a container), "
    "or the owner is dead"
)
_NAME_REASONS = {
    "not found": (ELSEWHERE, "look again from the host's pid namespace (hostPID)"),
    "unknown error": (
        "the driver lists a pid without a name: it is dead, defunct or in another pid namespace",
        "look at /proc/<pid>/status on the host, and for children that hold the devices",
    ),
    "insufficient permissions": (
        "nvidia-smi may not see this process",
        "take the dump as root",
    ),
    "no permission": ("nvidia-smi may not see this process", "take the dump as root"),
}
_LOST_WORDS = frozenset({"err!", "gpu is lost", "gpu requires reset", "reset required"})


class Read(NamedTuple):
    """A value, or None with the reason; None without a reason means "there is none"."""

    value: Any
    reason: str = ""


def placeholder(text: str) -> str | None:
    """The placeholder word that ``text`` consists of, in lower case, or None."""
    match = PLACEHOLDER.fullmatch(text.strip())
    return match["word"].lower() if match else None


def _quantity(text: str) -> tuple[float, str] | str:
    """The number and unit, or the reason why there is none."""
    shown = text.strip()
    if placeholder(shown) or shown in ("", "-"):
        return f"printed as {shown or 'nothing'}"
    cut = _CUT_OFF.fullmatch(shown)
    if cut:
        return f"cut off in the dump after {cut[1][:20]}"
    match = _QUANTITY.fullmatch(shown)
    if match is None:
        return f"not a number: {shown[:40]}"
    return float(match["number"]), match["unit"].lower()


def memory_of(text: str) -> Read:
    """Bytes of ``576 MiB``, ``576MiB`` or a bare number, which counts MiB."""
    read = _quantity(text)
    if isinstance(read, str):
        return Read(None, read)
    number, unit = read
    scale = _SCALES.get(unit)
    if scale is None or number < 0 or number * scale > NUMBER_LIMIT:
        return Read(None, f"not an amount of memory: {text.strip()[:40]}")
    return Read(int(number * scale))


def percent_of(text: str) -> Read:
    """Whole percent, 0 to 100; drivers are known to report garbage above."""
    read = _quantity(text)
    if isinstance(read, str):
        return Read(None, read)
    number, unit = read
    if unit not in ("", "%") or not 0 <= number <= 100:
        return Read(None, f"not a percentage: {text.strip()[:40]}")
    return Read(int(number))


def celsius_of(text: str) -> Read:
    """Whole degrees Celsius."""
    read = _quantity(text)
    if isinstance(read, str):
        return Read(None, read)
    number, unit = read
    if unit not in ("", "c") or not -300 < number < 1000:
        return Read(None, f"not a temperature: {text.strip()[:40]}")
    return Read(int(number))


def watts_of(text: str) -> Read:
    """Watts as a float."""
    read = _quantity(text)
    if isinstance(read, str):
        return Read(None, read)
    number, unit = read
    if unit not in ("", "w") or not 0 <= number < 1e6:
        return Read(None, f"not a power: {text.strip()[:40]}")
    return Read(number)


def number_of(text: str) -> Read:
    """A whole number of at most 18 digits, such as a minor number."""
    shown = text.strip()
    if shown.isascii() and shown.isdigit() and len(shown) <= 18:
        return Read(int(shown))
    return Read(None, f"printed as {shown[:40] or 'nothing'}")


def instance_of(text: str) -> int | None:
    """A MIG instance id; None outside MIG (N/A, or all bits set)."""
    value = number_of(text).value
    return value if isinstance(value, int) and value < 0xFFFFFFFF else None


def pid_of(text: str) -> int | None:
    """A process id that Linux could have given out, else None."""
    value = number_of(text).value
    return value if isinstance(value, int) and 0 < value < PID_LIMIT else None


def pci_of(text: str) -> str | None:
    """The address as ``dddddddd:bb:dd.f`` in lower case."""
    match = _PCI.fullmatch(text.strip())
    if match is None:
        return None
    domain = (match["domain"] or "0").lower().zfill(8)
    return f"{domain}:{match['bus']}:{match['device']}.{match['function'] or '0'}".lower()


def kinds_of(text: str) -> tuple[ClientKind, ...]:
    """The driver's letters in ``C``, ``G``, ``C+G`` or ``M+C``, in the order C, G, M."""
    letters = text.strip().split("+")
    return tuple(kind for kind in _KINDS if kind in letters)


def time_of(text: str) -> int | None:
    """Unix nanoseconds of a printed local time, read as if it were UTC."""
    shown = text.strip()
    match = _CTIME.fullmatch(shown)
    if match is not None:
        if match["month"] not in _MONTHS:
            return None
        month = _MONTHS.index(match["month"]) + 1
        fraction = ""
    else:
        match = _SLASHED.fullmatch(shown)
        if match is None:
            return None
        month = int(match["month"])
        fraction = match["fraction"] or ""
    year, day = int(match["year"]), int(match["day"])
    hour, minute, second = int(match["hour"]), int(match["minute"]), int(match["second"])
    # NVML did not exist before 2007, and years past 2200 overflow 64-bit nanoseconds soon after.
    if not (2000 <= year < 2200 and 1 <= month <= 12 and 1 <= day <= 31):
        return None
    if hour > 23 or minute > 59 or second > 60:
        return None
    seconds = timegm((year, month, day, hour, minute, second))
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0") or 0)


def lost_reason(texts: list[str]) -> str | None:
    """The first text that says that the device itself is lost or broken."""
    for text in texts:
        word = placeholder(text)
        if word in _LOST_WORDS:
            return text.strip().strip("[]")
    return None


class Draft(Struct):
    """The facts of one dump while it is read; merges what the dump says twice."""

    kind: str
    gpus: dict[str, Gpu] = field(default_factory=dict)
    clients: dict[tuple[str, int], GpuClient] = field(default_factory=dict)
    accounted: list[AccountedProcess] = field(default_factory=list)
    gaps: dict[tuple[str, str], Gap] = field(default_factory=dict)
    driver_version: str | None = None
    cuda_version: str | None = None
    taken_at_ns: int | None = None

    def gap(self, what: str, reason: str, remedy: str = "") -> None:
        """Notes what could not be known; the same again only counts."""
        if len(self.gaps) >= GAP_LIMIT and (what, reason) not in self.gaps:
            what, reason, remedy = "more of the dump", f"more than {GAP_LIMIT} such notes", ""
        key = (what, reason)
        known = self.gaps.get(key)
        self.gaps[key] = (
            replace(known, count=known.count + 1)
            if known
            else Gap(sensor=SENSOR, what=what, reason=reason, remedy=remedy)
        )

    def gpu(self, gpu: Gpu) -> Gpu:
        """Adds a GPU, or what is new about one that is known. Errors: Malformed, too many."""
        known = self.gpus.get(gpu.id)
        if known is None and len(self.gpus) >= GPU_LIMIT:
            raise Malformed(f"an nvidia-smi dump with more than {GPU_LIMIT} GPUs")
        if known is not None:
            news = {
                name: getattr(gpu, name)
                for name in gpu.__struct_fields__
                if name != "unread" and getattr(gpu, name) is not None
            }
            unread = {**known.unread, **gpu.unread}
            merged = replace(known, **news)
            gpu = replace(
                merged,
                unread={
                    name: reason
                    for name, reason in unread.items()
                    if name == PROCESSES or getattr(merged, name, None) is None
                },
            )
        self.gpus[gpu.id] = gpu
        return gpu

    def unknown_gpu(self) -> str:
        """The id to file a process under when the dump does not say on which GPU it is."""
        reason = "the dump does not say on which GPU these processes are"
        if UNKNOWN_GPU not in self.gpus:
            self.gpu(Gpu(id=UNKNOWN_GPU, unread={"uuid": reason, "index": reason}))
            self.gap("the GPU of processes", reason)
        return UNKNOWN_GPU

    def pid(self, text: str, where: str) -> int | None:
        """The pid printed as ``text``; a number that no process can have is noted and ignored."""
        pid = pid_of(text)
        if pid is None:
            shown = text.strip()[:40] or "nothing"
            self.gap(f"a process entry on {where}", f"its pid is {shown}: ignored")
        return pid

    def client(
        self,
        gpu_id: str,
        pid: int,
        *,
        name: str | None,
        kinds: tuple[ClientKind, ...] = (),
        memory: Read | None = None,
        sm: Read | None = None,
        samples: tuple[UtilisationSample, ...] = (),
        instances: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Adds a process on a GPU; a second entry of the same adds its kinds and its memory."""
        unread: dict[str, str] = {}
        memory = memory or Read(None, "not in the dump")
        if memory.reason:
            unread["memory_bytes"] = memory.reason
        if sm is not None and sm.reason:
            unread["sm_percent"] = sm.reason
        shown = self._name(name, pid, unread)
        client = GpuClient(
            gpu_id=gpu_id,
            pid=pid,
            kinds=kinds,
            memory_bytes=memory.value,
            sm_percent=sm.value if sm else None,
            samples=samples,
            source=self.kind,
            reported_name=shown,
            gpu_instance_id=instances[0],
            compute_instance_id=instances[1],
            unread=unread,
        )
        known = self.clients.get((gpu_id, pid))
        self.clients[gpu_id, pid] = _merged(known, client) if known else client

    def _name(self, name: str | None, pid: int, unread: dict[str, str]) -> str | None:
        if name is None:
            unread["reported_name"] = "not in the dump"
            return None
        word = placeholder(name)
        if word or not name.strip() or name.strip() == "-":
            shown = name.strip() or "nothing"
            reason, remedy = _NAME_REASONS.get(word or "", ("the driver gave no name", ""))
            unread["reported_name"] = f"printed as {shown}: {reason}"
            self.gap(f"the name of process {pid}", f"printed as {shown}: {reason}", remedy)
            return None
        if len(name) > NAME_LIMIT:
            self.gap(f"the name of process {pid}", f"cut after {NAME_LIMIT} characters")
            return name[:NAME_LIMIT]
        return name

    def hide_processes(self, gpu_id: str, shown: str, reason: str, remedy: str = "") -> None:
        """Notes that a GPU's processes could not be seen, so that it does not pass for idle."""
        gpu = self.gpus[gpu_id]
        if PROCESSES not in gpu.unread:
            self.gpus[gpu_id] = replace(gpu, unread={**gpu.unread, PROCESSES: reason})
        self.gap(f"processes on {shown}", f"cannot see processes on this GPU: {reason}", remedy)

    def doubt_empty_list(self, gpu_id: str, shown: str) -> None:
        """A GPU that computes and holds memory with nobody listed is not idle: says so."""
        gpu = self.gpus[gpu_id]
        busy = gpu.sm_percent is not None and gpu.sm_percent >= BUSY_PERCENT
        used = gpu.memory_used_bytes is not None and gpu.memory_used_bytes >= BUSY_BYTES
        if busy and used:
            self.hide_processes(
                gpu_id,
                shown,
                f"its list is empty while it is {gpu.sm_percent} % busy with "
                f"{(gpu.memory_used_bytes or 0) >> 20} MiB in use; inside a container nvidia-smi "
                "lists no foreign processes",
                "take the dump on the host, as root",
            )


def _merged(known: GpuClient, more: GpuClient) -> GpuClient:
    def larger(name: str) -> Any:
        pair = [v for v in (getattr(known, name), getattr(more, name)) if v is not None]
        return max(pair, default=None)

    merged = replace(
        known,
        kinds=tuple(kind for kind in _KINDS if kind in known.kinds or kind in more.kinds),
        # The compute and the graphics list both give the process's whole memory.
        memory_bytes=larger("memory_bytes"),
        sm_percent=larger("sm_percent"),
        samples=known.samples + more.samples,
        reported_name=known.reported_name or more.reported_name,
        gpu_instance_id=larger("gpu_instance_id"),
        compute_instance_id=larger("compute_instance_id"),
    )
    unread = {**more.unread, **known.unread}
    return replace(
        merged, unread={n: r for n, r in unread.items() if getattr(merged, n, None) is None}
    )


def set_field(
    fields: dict[str, Any],
    unread: dict[str, str],
    name: str,
    reader: Callable[[str], Read],
    text: str | None,
) -> None:
    """Puts ``reader(text)`` into ``fields``, or the reason into ``unread``; None is "absent"."""
    read = Read(None, "not in the dump") if text is None else reader(text)
    if read.value is not None:
        fields[name] = read.value
    elif read.reason:
        unread[name] = read.reason
