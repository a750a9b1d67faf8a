"""``nvidia-smi -q -x`` dumps of the drivers 384 to 595 as facts; the markup is scanned elsewhere.

Elements moved between drivers: power stands under ``power_readings`` before 535, the driver's
reserve is a field of its own since about 510, MIG devices carry no UUID in most versions.
"""

from __future__ import annotations

from typing import Any

from gpuwarden.model import AccountedProcess, Gpu
from gpuwarden.pattern import pattern
from gpuwarden.sensors.nvidia_smi.markup import (
    ACCOUNTED,
    GPU,
    LOG,
    LOOKS_LIKE,
    MIG,
    POWER,
    PROCESS,
    Record,
    scan,
)
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

KIND = "nvidia-smi-xml"
_GPU_ID = pattern(r"""\bid\s*=\s*["']([^"']{1,64})["']""")


def read_xml(text: str) -> Draft | None:
    """The facts of a dump or of a fragment of one; None if it is none. Errors: Malformed."""
    if not LOOKS_LIKE.search(text):
        return None
    found = scan(text)
    draft = Draft(kind=KIND)
    logs = found.top.find(LOG)
    for log in [*logs, found.top]:
        _read_log(draft, log, is_log=log is not found.top)
    if not (draft.gpus or draft.clients or logs or draft.gaps):
        return None
    if not logs:
        draft.gap("the dump", "a fragment: its root element is missing")
    if found.damage:
        draft.gap(
            "the dump",
            f"damaged, not well-formed: {'; '.join(found.damage)}. Entries may be missing",
            "take the dump again",
        )
    if found.cut_off:
        draft.gap("the dump", "incomplete: it is cut off", "take the dump again")
    if draft.driver_version is None:
        draft.gap("the driver version", "not in the dump")
    return draft


def _read_log(draft: Draft, log: Record, *, is_log: bool) -> None:
    version = log.get("driver_version")
    if version and not placeholder(version):
        draft.driver_version = draft.driver_version or version.strip()[:64]
    cuda = log.get("cuda_version")
    if cuda and not placeholder(cuda):
        draft.cuda_version = draft.cuda_version or cuda.strip()[:64]
    draft.taken_at_ns = draft.taken_at_ns or time_of(log.get("timestamp") or "")
    gpus = log.find(GPU)
    for gpu in gpus:
        _read_gpu(draft, gpu)
    for process in log.find(PROCESS):
        _read_process(draft, process, draft.unknown_gpu(), "an unnamed GPU", {})
    for accounted in log.find(ACCOUNTED):
        _read_accounted(draft, accounted, draft.unknown_gpu(), "an unnamed GPU")
    for mig in log.find(MIG):
        _read_mig(draft, mig, draft.unknown_gpu(), None)
    if not is_log:
        return
    attached = log.get("attached_gpus")
    count = number_of(attached or "").value
    if count is not None and count != len(gpus):
        draft.gap(
            "GPUs",
            f"the dump says that {count} are attached and carries {len(gpus)}: "
            "the others, and who is on them, were not seen",
        )
    elif not gpus and attached is None:
        draft.gap("GPUs", "the dump carries none, and does not say how many are attached")


def _first(record: Record, paths: tuple[str, ...]) -> str | None:
    """The first of several elements that holds a value, since names moved between drivers."""
    present = [record.values[path] for path in paths if path in record.values]
    return next(
        (text for text in present if not placeholder(text)), present[0] if present else None
    )


def _memory(record: Record, fields: dict[str, Any], unread: dict[str, str]) -> None:
    section = "fb_memory_usage/"
    set_field(fields, unread, "memory_total_bytes", memory_of, record.get(section + "total"))
    set_field(fields, unread, "memory_used_bytes", memory_of, record.get(section + "used"))
    reserved = record.get(section + "reserved")
    if reserved is None and "memory_used_bytes" in fields:
        unread["memory_reserved_bytes"] = "this driver counts its own reserve as used"
        return
    set_field(fields, unread, "memory_reserved_bytes", memory_of, reserved)


def _flag(text: str | None) -> bool | None:
    return {"enabled": True, "disabled": False}.get((text or "").strip().lower())


def _read_gpu(draft: Draft, record: Record) -> None:
    attribute = _GPU_ID.search(record.attributes)
    address = pci_of(record.get("pci/pci_bus_id") or "") or pci_of(
        attribute[1] if attribute else ""
    )
    uuid = (record.get("uuid") or "").strip()[:100]
    if placeholder(uuid):
        uuid = ""
    fields: dict[str, Any] = {}
    unread: dict[str, str] = {}
    set_field(fields, unread, "minor", number_of, record.get("minor_number"))
    set_field(fields, unread, "sm_percent", percent_of, record.get("utilization/gpu_util"))
    set_field(
        fields, unread, "memory_busy_percent", percent_of, record.get("utilization/memory_util")
    )
    set_field(fields, unread, "temperature_celsius", celsius_of, record.get("temperature/gpu_temp"))
    set_field(fields, unread, "power_watts", watts_of, _first(record, POWER))
    _memory(record, fields, unread)
    unread["index"] = "not in the dump: the order of the GPUs in it is not their index"
    name = (record.get("product_name") or "").strip()[:200]
    identity = uuid or address or (attribute[1].strip() if attribute else "")
    if not identity:
        identity = f"unnamed:{len(draft.gpus)}"
        draft.gap("a GPU's identity", "the dump gives it neither UUID nor PCI address")
    shown = f"GPU {address or identity}"
    known = identity in draft.gpus
    if known:
        draft.gap(shown, "it is in the dump more than once: read together")
    gpu = draft.gpu(
        Gpu(
            id=identity,
            uuid=uuid or None,
            name=name if name and not placeholder(name) else None,
            pci_address=address,
            mig_enabled=_flag(record.get("mig_mode/current_mig")),
            memory_is_numa=_numa(record.get("addressing_mode")),
            accounting_enabled=_flag(record.get("accounting_mode")),
            error=_error(record),
            unread=unread,
            **fields,
        )
    )
    if gpu.error:
        draft.gap(shown, f"the driver reports: {gpu.error}")
    partitions: dict[tuple[int | None, int | None], str] = {}
    for mig in record.find(MIG):
        mig_id = _read_mig(draft, mig, identity, gpu)
        entry = draft.gpus[mig_id]
        partitions[entry.gpu_instance_id, entry.compute_instance_id] = mig_id
    before = len(draft.clients)
    for process in record.find(PROCESS):
        _read_process(draft, process, identity, shown, partitions)
    for accounted in record.find(ACCOUNTED):
        _read_accounted(draft, accounted, identity, shown)
    listed = (record.get("processes") or "").strip()
    if "processes" not in record.values:
        where = "in" if record.find(PROCESS) else "before or in"
        draft.hide_processes(
            identity,
            shown,
            "the dump has no process list for it"
            if record.closed
            else f"the dump is cut off {where} its process list",
        )
    elif listed and listed.lower() != "none" and not record.find(PROCESS):
        draft.hide_processes(identity, shown, f"its process list reads {listed[:80]}")
    elif len(draft.clients) == before and not known:
        draft.doubt_empty_list(identity, shown)


def _numa(text: str | None) -> bool | None:
    # ATS: the GPU's memory is a NUMA node of the system (GH200, GB200).
    return {"ats": True, "hmm": False, "none": False}.get((text or "").strip().lower())


def _error(record: Record) -> str | None:
    lost = lost_reason(
        [
            record.values.get(path, "")
            for path in (
                "product_name",
                "uuid",
                "fan_speed",
                "utilization/gpu_util",
                "temperature/gpu_temp",
                "fb_memory_usage/used",
                "processes",
                *POWER,
            )
        ]
    )
    if lost:
        return lost
    action = (record.get("gpu_recovery_action") or "").strip()
    if action and action.lower() != "none" and not placeholder(action):
        return f"recovery action: {action[:80]}"
    if (record.get("gpu_reset_status/reset_required") or "").strip().lower() == "yes":
        return "reset required"
    return None


def _read_mig(draft: Draft, record: Record, parent_id: str, parent: Gpu | None) -> str:
    gi = instance_of(record.get("gpu_instance_id") or "")
    ci = instance_of(record.get("compute_instance_id") or "")
    uuid = (record.get("uuid") or "").strip()[:100]
    if placeholder(uuid):
        uuid = ""
    fields: dict[str, Any] = {}
    unread: dict[str, str] = {"sm_percent": "not measured under MIG"}
    _memory(record, fields, unread)
    shown = [("?" if number is None else str(number)) for number in (gi, ci)]
    mig_id = uuid or f"{parent_id}/gi{shown[0]}/ci{shown[1]}"
    draft.gpu(
        Gpu(
            id=mig_id,
            uuid=uuid or None,
            name=f"{(parent and parent.name) or 'GPU'} MIG {shown[0]}/{shown[1]}",
            pci_address=parent.pci_address if parent else None,
            minor=parent.minor if parent else None,
            parent_id=parent_id,
            gpu_instance_id=gi,
            compute_instance_id=ci,
            mig_enabled=True,
            unread=unread,
            **fields,
        )
    )
    return mig_id


def _read_process(
    draft: Draft,
    record: Record,
    gpu_id: str,
    shown: str,
    partitions: dict[tuple[int | None, int | None], str],
) -> None:
    pid = draft.pid(record.get("pid") or "", shown)
    if pid is None:
        return
    if record.repeated:
        draft.gap(
            f"process {pid} on {shown}",
            "its entry holds an element twice: damaged, or a name that imitates the dump's markup",
        )
    gi = instance_of(record.get("gpu_instance_id") or "")
    ci = instance_of(record.get("compute_instance_id") or "")
    memory = record.get("used_memory")
    draft.client(
        partitions.get((gi, ci), gpu_id),
        pid,
        name=record.get("process_name"),
        kinds=kinds_of(record.get("type") or ""),
        memory=Read(None, "not in the dump") if memory is None else memory_of(memory),
        instances=(gi, ci),
    )


def _read_accounted(draft: Draft, record: Record, gpu_id: str, shown: str) -> None:
    pid = draft.pid(record.get("pid") or "", f"{shown}'s accounting")
    if pid is None:
        return
    busy = record.get("time") or ""
    running = (record.get("is_running") or "").strip().lower()
    draft.accounted.append(
        AccountedProcess(
            gpu_id=gpu_id,
            pid=pid,
            busy_ms=number_of(busy.strip().removesuffix("ms")).value,
            sm_percent=percent_of(record.get("gpu_util") or "").value,
            memory_max_bytes=memory_of(record.get("max_memory_usage") or "").value,
            running={"1": True, "yes": True, "0": False, "no": False}.get(running),
        )
    )
