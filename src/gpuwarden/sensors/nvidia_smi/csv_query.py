"""CSV of ``nvidia-smi --query-compute-apps``, ``--query-accounted-apps`` and ``--query-gpu``.

There is no quoting: a process name with commas is what is left when the other columns have been
taken from both ends. Columns come from the header, from the command in a comment line, or, with
``noheader``, from the shape of the row. One file may hold several such blocks.
"""

from __future__ import annotations

import re
from typing import Any

from gpuwarden.model import AccountedProcess, Gpu
from gpuwarden.pattern import pattern
from gpuwarden.sensors.nvidia_smi.text import lines_of
from gpuwarden.sensors.nvidia_smi.values import (
    Draft,
    celsius_of,
    memory_of,
    number_of,
    pci_of,
    percent_of,
    pid_of,
    placeholder,
    set_field,
    time_of,
    watts_of,
)

KIND = "nvidia-smi-csv"

Row = dict[str, str]
APPS, ACCOUNTED, GPUS = "compute-apps", "accounted-apps", "gpu"

_APPS = frozenset(
    "timestamp gpu_name gpu_bus_id gpu_serial gpu_uuid pid process_name name used_memory"
    " used_gpu_memory".split()
)
_ACCOUNTED = frozenset(
    "timestamp gpu_name gpu_bus_id gpu_serial gpu_uuid vgpu_instance pid gpu_utilization gpu_util"
    " mem_utilization mem_util max_memory_usage time".split()
)
# "index" and "name" head many tables; these head nvidia-smi's.
_GPU_COLUMNS = frozenset(
    "uuid gpu_uuid gpu_name pci.bus_id gpu_bus_id driver_version memory.total memory.used"
    " memory.reserved memory.free utilization.gpu utilization.memory temperature.gpu power.draw"
    " power.draw.instant accounting.mode mig.mode.current".split()
)
_HEADER_CELL = pattern(r"(?P<name>[a-z][\w.]{0,60})(?:\s\[[\w%/]{1,8}\])?", re.ASCII)
_COMMAND = pattern(r"--query-(compute-apps|accounted-apps|gpu)=([\w.,]{1,1000})", re.ASCII)
_UUID = pattern(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}")
_BUS_ID = pattern(r"[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_MEMORY_WITH_UNIT = pattern(r"\d{1,12} MiB|\[N/A\]|\[Not Supported\]|N/A|\[Insufficient .*\]")
_NUMBER = pattern(r"\d{1,12}")


def _columns(line: str) -> tuple[str, ...] | None:
    """The columns that a header line names, or None if it is a row."""
    names = []
    for cell in line.split(","):
        match = _HEADER_CELL.fullmatch(cell.strip())
        if match is None:
            return None
        names.append(match["name"])
    known = set(names)
    if len(names) < 2 or ", " not in line:
        return None
    if "pid" in known:
        return tuple(names) if known <= _APPS | _ACCOUNTED else None
    return tuple(names) if known & _GPU_COLUMNS else None


def _query(columns: tuple[str, ...]) -> str:
    """Which of the queries prints such columns."""
    if "pid" not in columns:
        return GPUS
    return ACCOUNTED if set(columns) & (_ACCOUNTED - _APPS) else APPS


def _shape(line: str) -> dict[str, str] | None:
    """A header-less compute-apps row by its shape: ids on the left, memory on the right."""
    cells = [cell.strip() for cell in line.split(",")]
    row: dict[str, str] = {}
    left, right = 0, len(cells)
    while left < right and (
        cells[left].startswith(("GPU-", "MIG-")) or _BUS_ID.fullmatch(cells[left])
    ):
        row["gpu_bus_id" if _BUS_ID.fullmatch(cells[left]) else "gpu_uuid"] = cells[left]
        left += 1
    while right > left + 1:
        last = cells[right - 1]
        if _UUID.fullmatch(last):
            row["gpu_uuid"] = last
        elif _BUS_ID.fullmatch(last):
            row["gpu_bus_id"] = last
        elif "used_memory" not in row and (
            _MEMORY_WITH_UNIT.fullmatch(last) or _NUMBER.fullmatch(last)
        ):
            row["used_memory"] = last
        else:
            break
        right -= 1
    middle = cells[left:right]
    at = next((i for i, cell in enumerate(middle) if re.fullmatch(r"-?\d{1,10}", cell)), None)
    if at is None:
        return None
    row["pid"] = middle[at]
    before = ", ".join(middle[:at])
    raw = line.split(",")[left + at + 1 : right]
    after = ",".join(raw).strip()
    if before:
        row["gpu_name" if after else "process_name"] = before
    if after:
        row["process_name"] = after
    return row


def _certain(line: str) -> bool:
    """Whether a row cannot well be anything but compute-apps output."""
    row = _shape(line)
    if row is None or ", " not in line:
        return False
    memory = row.get("used_memory", "")
    return "gpu_uuid" in row or "gpu_bus_id" in row or bool(_MEMORY_WITH_UNIT.fullmatch(memory))


def _cells(line: str, columns: tuple[str, ...]) -> dict[str, str] | None:
    """A row under known columns, the free-text column taking what the others leave."""
    parts = line.split(",")
    spare = len(parts) - len(columns)
    if spare < 0:
        return None
    free = [i for i, name in enumerate(columns) if name in ("process_name", "name")]
    free = free or [i for i, name in enumerate(columns) if name == "gpu_name"]
    if spare and not free:
        return None
    at = free[0] if free else len(columns)
    row = {name: parts[i].strip() for i, name in enumerate(columns) if i < at}
    if free:
        row[columns[at]] = ",".join(parts[at : at + spare + 1]).strip()
    row.update({name: parts[i + spare].strip() for i, name in enumerate(columns) if i > at})
    return row


def _is_process(line: str, columns: tuple[str, ...]) -> bool:
    row = _cells(line, columns) if "pid" in columns else None
    return row is not None and pid_of(row["pid"]) is not None


def read_csv(text: str) -> Draft | None:
    """The facts of one or several CSV blocks; None if the text holds none."""
    draft = Draft(kind=KIND)
    columns: tuple[str, ...] | None = None
    rows: list[tuple[str, tuple[str, ...] | None]] = []
    asked: set[str] = set()
    for line in lines_of(text):
        command = _COMMAND.search(line)
        if columns and _is_process(line, columns):
            # Before all else: a process can be called "# …" or like a command.
            rows.append((line, columns))
        elif command and line.lstrip().startswith(("#", "$", "nvidia-smi")):
            columns = tuple(command[2].strip(",").split(","))
            asked.add(_query(columns))
        elif line.startswith("#") or not line.strip():
            continue
        elif (named := _columns(line)) is not None:
            columns = named
            asked.add(_query(columns))
        else:
            rows.append((line, columns))
    if not asked:
        if not (rows and all(_certain(line) for line, _ in rows)):
            return None
        asked = {APPS}
    # GPUs first, so that a process that names only its GPU's bus id finds it.
    tables = _sorted_rows(draft, rows)
    for row in tables[0]:
        _gpu_row(draft, row)
    for row in tables[1]:
        _process_row(draft, row)
    for row in tables[2]:
        _accounted_row(draft, row)
    _say_what_is_missing(draft, asked)
    return draft


def _say_what_is_missing(draft: Draft, asked: set[str]) -> None:
    if APPS in asked:
        draft.gap("graphics processes", "--query-compute-apps lists compute processes only")
    if GPUS not in asked:
        draft.gap("GPUs without a process", "the dump names only GPUs that a process is on")
    if draft.driver_version is None:
        draft.gap("the driver version", "not in the dump")
    listed = {client.gpu_id for client in draft.clients.values()}
    for gpu_id, gpu in list(draft.gpus.items()):
        shown = f"GPU {gpu.index if gpu.index is not None else gpu_id}"
        if APPS not in asked:
            draft.hide_processes(gpu_id, shown, "the dump has no list of running processes")
        elif gpu_id not in listed:
            draft.doubt_empty_list(gpu_id, shown)


def _sorted_rows(
    draft: Draft, rows: list[tuple[str, tuple[str, ...] | None]]
) -> tuple[list[Row], list[Row], list[Row]]:
    gpus: list[Row] = []
    processes: list[Row] = []
    accounted: list[Row] = []
    for line, columns in rows:
        row = _cells(line, columns) if columns else None
        if row is None:
            row = _shape(line)
        if row is None:
            draft.gap("a row", "it does not fit the columns and was not read")
        elif "pid" not in row:
            gpus.append(row)
        elif columns and _query(columns) == ACCOUNTED:
            accounted.append(row)
        else:
            processes.append(row)
    return gpus, processes, accounted


def _readable(text: str | None) -> str | None:
    shown = (text or "").strip()[:200]
    return shown if shown and not placeholder(shown) else None


def _gpu_row(draft: Draft, row: Row) -> None:
    uuid = _readable(row.get("uuid") or row.get("gpu_uuid"))
    address = pci_of(row.get("pci.bus_id") or row.get("gpu_bus_id") or "")
    index = number_of(row.get("index", "")).value
    identity = uuid or address or (f"index:{index}" if index is not None else None)
    if identity is None:
        draft.gap("a row", "it names no GPU and was not read")
        return
    fields: dict[str, Any] = {}
    unread: dict[str, str] = {}
    if uuid is None:
        unread["uuid"] = "not in the dump"
    if index is None:
        unread["index"] = "not in the dump"
    set_field(fields, unread, "memory_total_bytes", memory_of, row.get("memory.total"))
    set_field(fields, unread, "memory_used_bytes", memory_of, row.get("memory.used"))
    set_field(fields, unread, "memory_reserved_bytes", memory_of, row.get("memory.reserved"))
    set_field(fields, unread, "sm_percent", percent_of, row.get("utilization.gpu"))
    set_field(fields, unread, "memory_busy_percent", percent_of, row.get("utilization.memory"))
    set_field(fields, unread, "temperature_celsius", celsius_of, row.get("temperature.gpu"))
    power = row.get("power.draw") or row.get("power.draw.instant")
    set_field(fields, unread, "power_watts", watts_of, power)
    draft.driver_version = draft.driver_version or _readable(row.get("driver_version"))
    draft.taken_at_ns = draft.taken_at_ns or time_of(row.get("timestamp", ""))
    draft.gpu(
        Gpu(
            id=identity,
            uuid=uuid,
            pci_address=address,
            index=index,
            name=_readable(row.get("name") or row.get("gpu_name")),
            unread=unread,
            **fields,
        )
    )


def _gpu_of(draft: Draft, row: Row) -> str:
    """The id of the GPU that a row names, added if it is new."""
    uuid = _readable(row.get("gpu_uuid"))
    address = pci_of(row.get("gpu_bus_id") or "")
    if uuid is None and address is None:
        return draft.unknown_gpu()
    if uuid is None or uuid not in draft.gpus:
        same = next((g for g in draft.gpus.values() if address and g.pci_address == address), None)
        if same is not None:
            return same.id
    unread = {"index": "not in the dump", "memory_used_bytes": "not in the dump"}
    if uuid is None:
        unread["uuid"] = "not in the dump"
    is_mig = uuid is not None and uuid.startswith("MIG-")
    if is_mig:
        unread["parent_id"] = "not in the dump"
    gpu = Gpu(
        id=uuid or address or "",
        uuid=uuid,
        pci_address=address,
        name=_readable(row.get("gpu_name")),
        mig_enabled=True if is_mig else None,
        unread=unread,
    )
    return draft.gpu(gpu).id


def _process_row(draft: Draft, row: Row) -> None:
    gpu_id = _gpu_of(draft, row)
    draft.taken_at_ns = draft.taken_at_ns or time_of(row.get("timestamp", ""))
    pid = draft.pid(row["pid"], gpu_id)
    if pid is None:
        return
    memory = row.get("used_memory", row.get("used_gpu_memory"))
    draft.client(
        gpu_id,
        pid,
        name=row.get("process_name", row.get("name")),
        kinds=("C",),
        memory=None if memory is None else memory_of(memory),
    )


def _accounted_row(draft: Draft, row: Row) -> None:
    gpu_id = _gpu_of(draft, row)
    pid = draft.pid(row["pid"], gpu_id)
    if pid is None:
        return
    draft.accounted.append(
        AccountedProcess(
            gpu_id=gpu_id,
            pid=pid,
            busy_ms=number_of(row.get("time", "").removesuffix("ms")).value,
            sm_percent=percent_of(row.get("gpu_utilization", row.get("gpu_util", ""))).value,
            memory_max_bytes=memory_of(row.get("max_memory_usage", "")).value,
        )
    )
