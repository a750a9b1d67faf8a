"""Compares gpuwarden with nvidia-smi, and with what CUDA programs did, on a machine with a GPU.

    python bench/gpu_check.py [--nvml-library PATH]
    python bench/gpu_check.py --stub

First `gpuwarden scan` and nvidia-smi, beside a small CUDA process if one can be made; then, as
root, `gpuwarden trace` and programs that make contexts, load code and launch it
(bench/cuda_check.py). ``--stub`` does the second part alone, with the stand-in driver library of
the tests. Prints a line for each check and overall results, in under five minutes. Exit codes: 0
all agree, 1 something differs, 2 there is no GPU to compare on.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOLD, STUB = "--hold", "--stub"
HOLD_BYTES = 512 << 20
HOLD_LIMIT_SECONDS = 120
COMMAND_SECONDS = 40
APPEAR_SECONDS = 20
MEMORY_TOLERANCE_BYTES = 64 << 20
PERCENT_TOLERANCE = 35
DEGREES_TOLERANCE = 8
AMOUNT = re.compile(r"\s*([\d.]+)\s*(MiB|KiB|GiB|%|C|W)?\s*")
FIGURES = (
    ("memory total", "memory_total_bytes", "total_bytes", 2 << 20),
    ("memory used", "memory_used_bytes", "used_bytes", MEMORY_TOLERANCE_BYTES),
    ("utilisation %", "sm_percent", "percent", PERCENT_TOLERANCE),
    ("temperature", "temperature_celsius", "degrees", DEGREES_TOLERANCE),
)
"""A name, the report's key, our attribute of nvidia-smi's figure, and how far apart is near."""
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


# -------------------------------------------------------------------- a CUDA process of our own


def hold() -> int:
    """Keeps a context with memory and a busy GPU until its input ends."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    steps: tuple[Callable[[], int], ...] = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device),
        lambda: cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(HOLD_BYTES)),
    )
    for number, step in enumerate(steps):
        code = step()
        if code:
            print(f"failed at step {number} with CUDA error {code}", flush=True)
            return 1
    print("ready", flush=True)
    end = time.monotonic() + HOLD_LIMIT_SECONDS
    os.set_blocking(0, False)
    while time.monotonic() < end:
        for _ in range(64):
            cuda.cuMemsetD32_v2(memory, ctypes.c_uint(7), ctypes.c_size_t(HOLD_BYTES // 4))
        cuda.cuCtxSynchronize()
        try:
            if os.read(0, 1) == b"":
                break
        except BlockingIOError:
            pass
    return 0


@contextmanager
def cuda_process() -> Iterator[int | None]:
    """The pid of a process with a CUDA context, or None when none can be made; ended on leaving."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said != "ready":
            print(f"note    no CUDA process of our own: {said or 'libcuda.so.1 cannot be used'}")
        yield process.pid if said == "ready" else None
    finally:
        process.kill()
        process.wait()


# -------------------------------------------------------------------- what each tool says


@dataclass
class Device:
    """A GPU or a MIG device as nvidia-smi prints it; None where it says N/A."""

    uuid: str
    name: str | None = None
    pci_address: str | None = None
    mig: bool = False
    total_bytes: float | None = None
    used_bytes: float | None = None
    percent: float | None = None
    degrees: float | None = None
    processes: dict[int, float | None] = field(default_factory=dict)


def amount(text: str | None) -> float | None:
    found = AMOUNT.fullmatch(text or "")
    return float(found[1]) * UNITS.get(found[2], 1) if found else None


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, timeout=COMMAND_SECONDS, check=False)
    return done.stdout.decode("utf-8", "replace")


def nvidia_smi() -> dict[str, Device]:
    """Every GPU of `nvidia-smi -q -x` by UUID."""
    devices: dict[str, Device] = {}
    root = ET.fromstring(run("nvidia-smi", "-q", "-x"))
    for gpu in root.iter("gpu"):
        uuid = gpu.findtext("uuid") or ""
        devices[uuid] = Device(
            uuid=uuid,
            name=gpu.findtext("product_name"),
            pci_address=(gpu.get("id") or "").lower() or None,
            mig=gpu.findtext("mig_mode/current_mig") == "Enabled",
            total_bytes=amount(gpu.findtext("fb_memory_usage/total")),
            used_bytes=amount(gpu.findtext("fb_memory_usage/used")),
            percent=amount(gpu.findtext("utilization/gpu_util")),
            degrees=amount(gpu.findtext("temperature/gpu_temp")),
            processes={
                int(info.findtext("pid") or 0): amount(info.findtext("used_memory"))
                for info in gpu.iterfind("processes/process_info")
            },
        )
    return devices


def process_percents() -> dict[int, int]:
    """Each pid's SM percent in one `nvidia-smi pmon` reading; a dash is left out."""
    found: dict[int, int] = {}
    for line in run("nvidia-smi", "pmon", "-c", "1", "-s", "u").splitlines():
        words = line.split()
        if len(words) > 3 and words[1].isdigit() and words[3].isdigit():
            found[int(words[1])] = int(words[3])
    return found


def scan(arguments: list[str]) -> dict[str, Any]:
    beside = Path(sys.executable).parent / "gpuwarden"
    program = str(beside) if beside.exists() else shutil.which("gpuwarden")
    argv = [program] if program else [sys.executable, "-m", "gpuwarden"]
    started = time.perf_counter()
    done = subprocess.run(
        [*argv, "scan", "--format", "json", *arguments],
        capture_output=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    print(f"note    the scan took {time.perf_counter() - started:.2f} s, exit {done.returncode}")
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"gpuwarden printed no JSON: {done.stderr.decode()[-500:]}") from None
    return document


# -------------------------------------------------------------------- the comparison


class Comparison:
    """Prints each check and counts those that differ."""

    def __init__(self) -> None:
        self.checks = 0
        self.differ = 0

    def check(self, what: str, agree: bool, ours: object, theirs: object) -> None:
        self.checks += 1
        self.differ += not agree
        said = f"{ours}" if agree else f"gpuwarden {ours}, nvidia-smi {theirs}"
        print(f"{'agree ' if agree else 'DIFFER'}  {what}: {said}")

    def near(
        self, what: str, ours: float | None, theirs: list[float | None], tolerance: float
    ) -> None:
        """Agrees when ours lies within what was read before and after, give or take."""
        known = [value for value in theirs if value is not None]
        if ours is None or not known:
            self.check(what, ours is None and not known, ours, theirs)
            return
        within = min(known) - tolerance <= ours <= max(known) + tolerance
        self.check(what, within, ours, theirs)


def compare(
    document: dict[str, Any],
    before: dict[str, Device],
    after: dict[str, Device],
    percents: dict[int, int],
    own_pid: int | None,
) -> Comparison:
    result = Comparison()
    whole = {gpu["id"]: gpu for gpu in document["gpus"] if not gpu.get("parent_id")}
    nvidia = {uuid: gpu for uuid, gpu in whole.items() if gpu.get("vendor", "nvidia") == "nvidia"}
    result.check("GPUs", set(nvidia) == set(before), sorted(nvidia), sorted(before))
    for uuid in sorted(set(nvidia) & set(before)):
        ours, theirs, later = nvidia[uuid], before[uuid], after.get(uuid, before[uuid])
        short = f"{uuid[:12]}…"
        result.check(
            f"{short} name", ours.get("name") == theirs.name, ours.get("name"), theirs.name
        )
        address = ours.get("pci_address")
        result.check(
            f"{short} PCI address", address == theirs.pci_address, address, theirs.pci_address
        )
        mig = bool(ours.get("mig_enabled"))
        result.check(f"{short} MIG", mig == theirs.mig, mig, theirs.mig)
        for what, key, attribute, tolerance in FIGURES:
            readings = [getattr(theirs, attribute), getattr(later, attribute)]
            result.near(f"{short} {what}", ours.get(key), readings, tolerance)
    listed = set(re.findall(r"UUID: (MIG-[^)\s]+)", run("nvidia-smi", "-L")))
    parts = {gpu["id"] for gpu in document["gpus"] if gpu.get("parent_id")}
    result.check("MIG devices", parts == listed, sorted(parts), sorted(listed))
    _compare_processes(result, document, before, after)
    if own_pid is not None:
        _compare_utilisation(result, document, percents)
    return result


def _compare_processes(
    result: Comparison,
    document: dict[str, Any],
    before: dict[str, Device],
    after: dict[str, Device],
) -> None:
    owner = {gpu["id"]: gpu.get("parent_id") or gpu["id"] for gpu in document["gpus"]}
    ours: dict[tuple[str, int], float | None] = {}
    holders: set[tuple[str, int]] = set()
    for row in document["rows"]:
        if row.get("pid") and row.get("gpu_id") in owner:
            key = (owner[row["gpu_id"]], row["pid"])
            if row.get("memory_bytes") is None:
                holders.add(key)
            else:
                ours[key] = (ours.get(key) or 0) + row["memory_bytes"]
    early = {(uuid, pid): m for uuid, d in before.items() for pid, m in d.processes.items()}
    late = {(uuid, pid): m for uuid, d in after.items() for pid, m in d.processes.items()}
    steady = set(early) & set(late)
    missing = steady - set(ours) - holders
    result.check(f"all {len(steady)} steady processes are shown", not missing, "yes", missing)
    extra = set(ours) - set(early) - set(late)
    result.check("no process is made up", not extra, extra or "none", "none of them")
    for key in sorted(steady & set(ours)):
        what = f"pid {key[1]} memory"
        result.near(what, ours[key], [early[key], late[key]], MEMORY_TOLERANCE_BYTES)


def _compare_utilisation(
    result: Comparison, document: dict[str, Any], percents: dict[int, int]
) -> None:
    ours = {r["pid"]: r.get("sm_percent") for r in document["rows"] if r.get("pid")}
    for pid, percent in sorted(percents.items()):
        if pid in ours:
            result.near(f"pid {pid} SM %", ours[pid], [percent], PERCENT_TOLERANCE)


def calls(*, stub: bool) -> int:
    """What was seen of CUDA programs; the exit code of bench/cuda_check.py."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bench import cuda_check

    print("\nCUDA calls")
    return cuda_check.check(stub=stub)


def main() -> int:
    if HOLD in sys.argv:
        return hold()
    if STUB in sys.argv:
        return calls(stub=True)
    if shutil.which("nvidia-smi") is None:
        print("no GPU to compare on: nvidia-smi is not installed here")
        return calls(stub=False)
    if "GPU 0" not in run("nvidia-smi", "-L"):
        print("no GPU to compare on: `nvidia-smi -L` lists none")
        return 2
    with cuda_process() as own_pid:
        deadline = time.monotonic() + APPEAR_SECONDS
        before = nvidia_smi()
        listed_at_start = sum(len(device.processes) for device in before.values())
        # In a container the driver gives host pids, so a process more is what can be waited for.
        while own_pid is not None and time.monotonic() < deadline and not listed_at_start:
            before = nvidia_smi()
            listed_at_start = sum(len(device.processes) for device in before.values())
        percents = process_percents()
        document = scan(sys.argv[1:])
        after = nvidia_smi()
        if own_pid is not None:
            shown = any(row.get("pid") == own_pid for row in document["rows"])
            print(
                f"note    our own CUDA process {own_pid} is {'' if shown else 'not '}in the report"
            )
        result = compare(document, before, after, percents, own_pid)
    for run_ in document.get("sensors", []):
        if run_["name"] == "nvml":
            print(f"note    nvml: {run_['state']}, {run_.get('seconds', 0):.3f} s")
    print(f"\n{result.checks - result.differ} of {result.checks} checks agree")
    return 1 if result.differ or calls(stub=False) == 1 else 0


if __name__ == "__main__":
    raise SystemExit(main())
