"""The texts for people that nvidia-smi prints: ``pmon``, ``dmon`` and the plain table.

pmon and dmon name their columns in rows that begin with ``#``, which differ between drivers and
options; without them the shape of a row tells what it can. The plain table's process block comes
in an old layout (GPU PID Type Name) and a new one with the MIG columns GI and CI.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct, field

from gpuwarden.model import Gpu, UtilisationSample
from gpuwarden.pattern import pattern
from gpuwarden.sensors.nvidia_smi.values import (
    Draft,
    Read,
    celsius_of,
    instance_of,
    kinds_of,
    lost_reason,
    memory_of,
    number_of,
    pci_of,
    percent_of,
    placeholder,
    set_field,
    time_of,
    watts_of,
)

PMON = "nvidia-smi-pmon"
DMON = "nvidia-smi-dmon"
TABLE = "nvidia-smi-table"
WIDTH_LIMIT = 200
"""The table is about 90 characters wide; longer lines are not tried as rows of GPUs."""

_TYPE = r"(?:[CGM](?:\+[CGM])*)"
_COLUMNS = pattern(r"#\s*(?:Date\s+)?(?:Time\s+)?gpu\s+\w", re.IGNORECASE)
_BARE_PMON = pattern(rf"\s*\d{{1,4}}\s+(?:-?\d{{1,10}}\s+(?:{_TYPE}|-)|-\s+-)\s+\S.*")
# pmon without its header: what the numbers between the type and the name are, by their count.
# Six are either "jpg ofa" or "fb ccpm" after the first four, so the memory stays unknown.
_SHAPES: dict[int, tuple[str, ...]] = {
    1: ("fb",),
    2: ("fb", "ccpm"),
    4: ("sm", "mem", "enc", "dec"),
    5: ("sm", "mem", "enc", "dec", "fb"),
    6: ("sm", "mem", "enc", "dec", "?", "?"),
    7: ("sm", "mem", "enc", "dec", "jpg", "ofa", "fb"),
    8: ("sm", "mem", "enc", "dec", "jpg", "ofa", "fb", "ccpm"),
}
_CELL = pattern(r"-|\d{1,6}")

_PROCESS_ROW = pattern(
    rf"\|\s+(?P<gpu>\d{{1,4}})\s+(?:(?P<gi>N/A|\d{{1,3}})\s+(?P<ci>N/A|\d{{1,3}})\s+)?"
    rf"(?P<pid>-?\d{{1,10}}|N/A)\s+(?P<type>{_TYPE}|-|N/A)\s+(?P<rest>\S.*)"
)
_MEMORY_CELL = pattern(
    r"\s(\d{1,12}\s?[KMG]iB|\d{1,12}[KMGiB]{0,3}\.{2,3}|N/A"
    r"|Function Not Found|\[?Not Supported\]?|\[?Insufficient Permissions\]?)$"
)
_NOT_LISTED_ROW = pattern(r"\|\s+(?P<gpu>\d{1,4})\s+(?P<why>Not Supported|N/A)\s+\|")
_PROCESS_TITLE = pattern(r"\|\s*Processes:")
_NOBODY = pattern(r"\|\s*No running (?:compute )?processes found")
_GPU_ROW = pattern(
    r"\|\s+(?P<gpu>\d{1,4})\s+(?P<name>\S.*?)\s+(?:On|Off|N/A|ERR!)?\s*\|"
    r"\s*(?P<address>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s"
)
_GPU_CELLS = pattern(
    r"\|\s*(?:\d+%|N/A|ERR!)?\s+(?P<temperature>\d+C|N/A|ERR!)\s+(?:P\d+|N/A|ERR!)\s+"
    r"(?P<power>\d+W|N/A|ERR!|Unknown Error)\s*/\s*\S+\s*\|"
    r"\s*(?P<used>\d+MiB|N/A|ERR!)\s*/\s*(?P<total>\d+MiB|N/A|ERR!)\s*\|"
    r"\s*(?P<busy>\d+%|N/A|ERR!)"
)
_VERSIONS = pattern(r"Driver Version:\s*(?P<driver>[\d.]{1,20})(?:\s+CUDA Version:\s*(\S{1,20}))?")


def lines_of(text: str) -> list[str]:
    """Lines by newline alone: names may hold the other separators that str.splitlines knows."""
    return [line.rstrip("\r") for line in text.split("\n")]


def _index_gpu(draft: Draft, index: str, **facts: Any) -> str:
    number = number_of(index).value
    gpu_id = f"index:{number}"
    if gpu_id not in draft.gpus:
        facts["unread"] = {"uuid": "not in this form of dump", **facts.get("unread", {})}
    draft.gpu(Gpu(id=gpu_id, index=number, **facts))
    return gpu_id


# -------------------------------------------------------------------------------- pmon and dmon


class _Monitor(Struct):
    """The rows of pmon: each loop repeats a process, and the newest row counts."""

    draft: Draft
    columns: list[str] = field(default_factory=list)
    newest: dict[tuple[str, int, str], dict[str, str]] = field(default_factory=dict)
    samples: dict[tuple[str, int], list[UtilisationSample]] = field(default_factory=dict)

    def row(self, line: str) -> None:
        cells = self.cells(line)
        if cells is None:
            self.draft.gap("a row", "it does not fit the columns and was not read")
            return
        index = cells["gpu"]
        gpu_id = _index_gpu(self.draft, index)
        if cells["pid"] == "-":
            return
        pid = self.draft.pid(cells["pid"], f"GPU {index}")
        if pid is None:
            return
        key = (gpu_id, pid, cells.get("type", ""))
        at_ns = time_of(f"{cells.get('date', '')} {cells.get('time', '')}")
        sm = percent_of(cells.get("sm", "-")).value
        if sm is None and cells.get("sm", "-") != "-" and key in self.newest:
            # Garbage such as 37100 is no sample; "-" is the answer "none".
            cells["sm"] = self.newest[key]["sm"]
        self.newest[key] = cells
        if at_ns is not None:
            self.draft.taken_at_ns = max(self.draft.taken_at_ns or 0, at_ns)
            if sm is not None:
                self.samples.setdefault((gpu_id, pid), []).append(
                    UtilisationSample(
                        at_ns=at_ns,
                        sm_percent=sm,
                        memory_percent=percent_of(cells.get("mem", "-")).value or 0,
                    )
                )

    def cells(self, line: str) -> dict[str, str] | None:
        columns = self.columns
        if not columns:
            parts = line.split()
            count = 0
            while 3 + count < len(parts) - 1 and _CELL.fullmatch(parts[3 + count]):
                count += 1
            columns = ["gpu", "pid", "type", *_SHAPES.get(count, ("?",) * count), "command"]
        parts = line.split(None, len(columns) - 1)
        if len(parts) < len(columns) - 1 or len(parts) < 2:
            return None
        cells = dict(zip(columns, parts, strict=False))
        if number_of(cells.get("gpu", "")).value is None or "pid" not in cells:
            return None
        return cells

    def finish(self) -> None:
        for (gpu_id, pid, _type), cells in self.newest.items():
            absent = Read(None, "not among the columns of this dump")
            self.draft.client(
                gpu_id,
                pid,
                name=cells.get("command", "").rstrip() or None,
                kinds=kinds_of(cells.get("type", "")),
                memory=memory_of(cells["fb"]) if "fb" in cells else absent,
                sm=percent_of(cells["sm"]) if "sm" in cells else absent,
                samples=tuple(self.samples.pop((gpu_id, pid), ())),
            )


def _header(line: str) -> list[str]:
    return [name.lower() for name in line.replace("#", " ").split()]


def read_pmon(text: str) -> Draft | None:
    """Processes of ``nvidia-smi pmon``, with or without its header rows; None if it is none."""
    rows = [line for line in lines_of(text) if line.strip()]
    headed = any(_COLUMNS.match(line) and "pid" in _header(line) for line in rows)
    if not headed and not (
        rows and all(line.startswith("#") or _BARE_PMON.fullmatch(line) for line in rows)
    ):
        return None
    monitor = _Monitor(Draft(kind=PMON))
    reading = not headed
    for line in rows:
        if line.startswith("#"):
            if _COLUMNS.match(line):
                monitor.columns = _header(line)
                reading = "pid" in monitor.columns
        elif reading:
            monitor.row(line)
    monitor.finish()
    draft = monitor.draft
    draft.gap("the driver version", "not in the dump")
    draft.gap("memory and names of the GPUs", "pmon numbers the GPUs and says no more of them")
    return draft


def read_dmon(text: str) -> Draft | None:
    """GPUs of ``nvidia-smi dmon``, the newest row of each; it lists no processes at all."""
    draft = Draft(kind=DMON)
    columns: list[str] = []
    seen = False
    newest: dict[str, dict[str, str]] = {}
    for line in lines_of(text):
        if line.startswith("#"):
            if _COLUMNS.match(line):
                columns = _header(line)
                seen = seen or "pid" not in columns
        elif columns and "pid" not in columns and line.strip():
            parts = line.split()
            cells = dict(zip(columns, parts, strict=False))
            if len(parts) < len(columns) or number_of(cells.get("gpu", "")).value is None:
                draft.gap("a row", "it does not fit the columns and was not read")
                continue
            newest[cells["gpu"]] = cells
            at_ns = time_of(f"{cells.get('date', '')} {cells.get('time', '')}")
            draft.taken_at_ns = max(filter(None, (draft.taken_at_ns, at_ns)), default=None)
    if not seen:
        return None
    for index, cells in newest.items():
        fields: dict[str, Any] = {}
        unread: dict[str, str] = {}
        set_field(fields, unread, "sm_percent", percent_of, cells.get("sm"))
        set_field(fields, unread, "memory_busy_percent", percent_of, cells.get("mem"))
        temperature = cells.get("gtemp", cells.get("temp"))
        set_field(fields, unread, "temperature_celsius", celsius_of, temperature)
        set_field(fields, unread, "power_watts", watts_of, cells.get("pwr"))
        set_field(fields, unread, "memory_used_bytes", memory_of, cells.get("fb"))
        gpu_id = _index_gpu(draft, index, unread=unread, **fields)
        draft.hide_processes(
            gpu_id,
            f"GPU {number_of(index).value}",
            "dmon shows GPUs and no processes",
            "take nvidia-smi -q -x or pmon",
        )
    draft.gap("the driver version", "not in the dump")
    return draft


# ------------------------------------------------------------------------------------- the table


def read_table(text: str) -> Draft | None:
    """The plain nvidia-smi table, or only rows of its process block; None if it is none."""
    draft = Draft(kind=TABLE)
    by_index: dict[int, str] = {}
    listed: set[str] = set()
    last_gpu: str | None = None
    found = in_processes = nobody = False
    for line in lines_of(text):
        stripped = line.strip()
        versions = _VERSIONS.search(stripped)
        narrow = len(stripped) <= WIDTH_LIMIT
        if row := _PROCESS_ROW.match(stripped.removesuffix("|").rstrip()):
            # Before all else: a process can be called like any other line of the table.
            found = True
            listed.add(_table_process(draft, row, by_index))
            continue
        if versions and stripped.startswith("|"):
            found = True
            draft.driver_version = versions["driver"]
            cuda = versions[2]
            draft.cuda_version = None if cuda is None or placeholder(cuda) else cuda
            continue
        if not stripped.startswith("|"):
            draft.taken_at_ns = draft.taken_at_ns or time_of(stripped)
            continue
        if _PROCESS_TITLE.match(stripped):
            found = in_processes = True
        elif _NOBODY.match(stripped):
            found = nobody = True
        elif narrow and not in_processes and (gpu := _GPU_ROW.match(stripped)):
            found = True
            last_gpu = _table_gpu(draft, gpu, by_index)
        elif narrow and last_gpu and not in_processes and (cells := _GPU_CELLS.match(stripped)):
            _table_cells(draft, last_gpu, cells)
            last_gpu = None
        elif in_processes and (why := _NOT_LISTED_ROW.match(stripped)):
            gpu_id = by_index.get(int(why["gpu"])) or _index_gpu(draft, why["gpu"])
            listed.add(gpu_id)
            draft.hide_processes(gpu_id, f"GPU {why['gpu']}", f"its row reads {why['why']}")
        elif in_processes and re.match(r"\|\s+\d", stripped):
            draft.gap("a row", "it looks like a process and could not be read")
    if not found:
        return None
    for gpu_id, known in list(draft.gpus.items()):
        shown = f"GPU {known.index}"
        if not in_processes and gpu_id not in listed:
            draft.hide_processes(gpu_id, shown, "the dump has no process block")
        elif gpu_id not in listed:
            draft.doubt_empty_list(gpu_id, shown)
    if not draft.gpus:
        draft.gap(
            "GPUs",
            "the dump shows none of them" + (", only that no process was listed" if nobody else ""),
        )
    if draft.driver_version is None:
        draft.gap("the driver version", "not in the dump")
    return draft


def _table_gpu(draft: Draft, row: re.Match[str], by_index: dict[int, str]) -> str:
    index = int(row["gpu"])
    address = pci_of(row["address"])
    name = row["name"]
    lost = lost_reason([name])
    gpu = draft.gpu(
        Gpu(
            id=address or f"index:{index}",
            index=index,
            pci_address=address,
            name=None if placeholder(name) else name,
            error=lost,
            unread={"uuid": "not in this form of dump", "minor": "not in this form of dump"},
        )
    )
    by_index[index] = gpu.id
    return gpu.id


def _table_cells(draft: Draft, gpu_id: str, cells: re.Match[str]) -> None:
    fields: dict[str, Any] = {}
    unread: dict[str, str] = {"memory_reserved_bytes": "not in this form of dump"}
    set_field(fields, unread, "temperature_celsius", celsius_of, cells["temperature"])
    set_field(fields, unread, "power_watts", watts_of, cells["power"])
    set_field(fields, unread, "memory_used_bytes", memory_of, cells["used"])
    set_field(fields, unread, "memory_total_bytes", memory_of, cells["total"])
    set_field(fields, unread, "sm_percent", percent_of, cells["busy"])
    lost = lost_reason([cells["temperature"], cells["used"], cells["busy"]])
    gpu = draft.gpu(Gpu(id=gpu_id, error=lost, unread=unread, **fields))
    if gpu.error:
        draft.gap(f"GPU {gpu.index}", f"the driver reports: {gpu.error}")


def _table_process(draft: Draft, row: re.Match[str], by_index: dict[int, str]) -> str:
    gpu_id = by_index.get(int(row["gpu"])) or _index_gpu(draft, row["gpu"])
    pid = draft.pid(row["pid"], f"GPU {row['gpu']}")
    if pid is None:
        return gpu_id
    rest = row["rest"]
    split = _MEMORY_CELL.search(rest)
    draft.client(
        gpu_id,
        pid,
        name=rest[: split.start()].rstrip() if split else rest,
        kinds=kinds_of(row["type"]),
        memory=memory_of(split[1]) if split else Read(None, "no memory column in its row"),
        instances=(instance_of(row["gi"] or ""), instance_of(row["ci"] or "")),
    )
    return gpu_id
