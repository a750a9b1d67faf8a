"""Recorded nvidia-smi output as facts: ``-q -x``, query CSV, ``pmon``, ``dmon``, the plain table.

The form is known by content, never by a file's name. A dump is a claim of whoever made it, and
tells less than the node itself: what it cannot tell stands in ``Dump.gaps``.
"""

from __future__ import annotations

import re

from msgspec import Struct

from gpuwarden.errors import Malformed
from gpuwarden.model import AccountedProcess, Gap, Gpu, GpuClient
from gpuwarden.pattern import pattern
from gpuwarden.sensors.nvidia_smi.csv_query import read_csv
from gpuwarden.sensors.nvidia_smi.text import TABLE, lines_of, read_dmon, read_pmon, read_table
from gpuwarden.sensors.nvidia_smi.values import Draft, pci_of
from gpuwarden.sensors.nvidia_smi.xml_dump import read_xml

DUMP_LIMIT_BYTES = 64 << 20
LINE_LIMIT = 250_000

_LOST_GPU = pattern(
    r"Unable to determine the device handle for (?:GPU|gpu)\s*(?P<address>[0-9A-Fa-f:.]{7,20}?):"
    r"\s+(?P<reason>[^\n]{1,200})"
)
# What nvidia-smi prints in place of a dump.
_FAILURES = pattern(
    r"^(?:NVIDIA-SMI has failed[^\n]{0,200}|Failed to initialize NVML: [^\n]{1,100}"
    r"|No devices were found[^\n]{0,80}|(?:Failed|Unable) to [^\n]{0,60}NVML[^\n]{0,100})",
    re.MULTILINE,
)


class Dump(Struct, frozen=True):
    """The facts of one recorded nvidia-smi output, and what it could not tell."""

    kind: str
    """``nvidia-smi-xml``, ``-csv``, ``-pmon``, ``-dmon`` or ``-table``."""
    gpus: tuple[Gpu, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    accounted: tuple[AccountedProcess, ...] = ()
    gaps: tuple[Gap, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    taken_at_ns: int | None = None
    """The printed time read as UTC, since no dump tells its time zone; None if it has none."""


def read_dump(data: bytes) -> Dump | None:
    """The facts of a recorded nvidia-smi output; None if the bytes are none that we know.

    Errors: Malformed past ``DUMP_LIMIT_BYTES``, ``LINE_LIMIT`` or the limits of the markup scanner.
    """
    if len(data) > DUMP_LIMIT_BYTES:
        raise Malformed(f"an nvidia-smi dump of more than {DUMP_LIMIT_BYTES >> 20} MiB")
    text = _decoded(data)
    if text.count("\n") > LINE_LIMIT:
        raise Malformed(f"an nvidia-smi dump of more than {LINE_LIMIT} lines")
    draft = None
    for reader in (read_xml, read_table, read_pmon, read_dmon, read_csv):
        draft = reader(text)
        if draft is not None:
            break
    draft = _with_failures(text, draft)
    if draft is None:
        return None
    return Dump(
        kind=draft.kind,
        gpus=tuple(draft.gpus.values()),
        clients=tuple(draft.clients.values()),
        accounted=tuple(draft.accounted),
        gaps=tuple(draft.gaps.values()),
        driver_version=draft.driver_version,
        cuda_version=draft.cuda_version,
        taken_at_ns=draft.taken_at_ns,
    )


def _decoded(data: bytes) -> str:
    # A redirect in PowerShell writes UTF-16 with a byte order mark.
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "backslashreplace")
    return data.decode("utf-8", "backslashreplace").removeprefix("\ufeff")


def _with_failures(text: str, draft: Draft | None) -> Draft | None:
    """Adds what nvidia-smi complained about around or in place of the dump."""
    failures = [match[0].strip() for match in _FAILURES.finditer(text)]
    lost = list(_LOST_GPU.finditer(text))
    if not failures and not lost:
        return draft
    if draft is None:
        # Words of an error message in any other text must not make it a dump.
        first = next((line.strip() for line in lines_of(text) if line.strip()), "")
        if not (_FAILURES.match(first) or _LOST_GPU.match(first)):
            return None
        draft = Draft(kind=TABLE)
    for failure in failures[:16]:
        draft.gap("GPUs", f"nvidia-smi could not see them: {failure}", "run gpuwarden doctor")
    for match in lost[:1024]:
        address = pci_of(match["address"]) or match["address"].lower()
        reason = match["reason"].strip()
        known = next((g.id for g in draft.gpus.values() if g.pci_address == address), address)
        draft.gpu(Gpu(id=known, pci_address=pci_of(match["address"]), error=reason))
        draft.hide_processes(known, f"GPU {address}", reason)
    return draft
