"""Calls of the CUDA driver for a person at a terminal: one line each.

Names of processes, kernels and files are what others chose: they are escaped and cut, so that a
line stays one line.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from gpuwarden.model import (
    CudaLibrary,
    KernelUse,
    LaunchFit,
    LaunchWindow,
    LoadedModule,
    ModuleLoad,
    ModuleStanding,
)
from gpuwarden.outputs.cuda_lines import Caller, standing_in
from gpuwarden.outputs.sheet import Sheet, cells, cut, pad
from gpuwarden.outputs.words import escape
from gpuwarden.probes.cuda.records import ContextCall

NARROWEST = 60
WIDE = 110
"""From here on a line has the place and milliseconds."""
DIGEST_SHOWN = 16
NAME_CELLS = 15
NARROW_NAME_CELLS = 10
PLACE_CELLS = 20
KERNELS_SHOWN = 8
TEXT_LIMIT = 400
HASH_LIKE = "hash-like"
KIB = 1 << 10
MIB = 1 << 20

_CALLS = {
    "created": "created",
    "retained": "primary retained",
    "green": "green made",
    "released": "primary released",
    "reset": "primary reset",
    "destroyed": "destroyed",
}
_STYLES = {3: "bold red", 2: "yellow"}
"""By how grave a module is: hash-like and not known, not known."""
_STANDINGS: dict[ModuleStanding, str] = {
    "known": "known",
    "rebuilt": "known, built elsewhere",
    "driver": "the driver's own",
    "jit": "allowed JIT",
    "unknown": "unknown",
}


def context_text(
    call: ContextCall,
    caller: Caller,
    *,
    at_ns: int,
    width: int,
    place: str = "",
    colour: bool = False,
) -> str:
    """A context that was made or ended, in one line."""
    device = "" if call.device is None else f" on device {call.device}"
    failed = f", failed with CUresult {call.result}" if call.result else ""
    text = f"{_CALLS[call.call]}{device}{failed}, {call.handle:#x}; {call.function}"
    return _line(at_ns, "context", caller, text, place=place, width=width, colour=colour)


def load_text(
    load: ModuleLoad,
    caller: Caller,
    *,
    at_ns: int,
    width: int,
    place: str = "",
    colour: bool = False,
) -> str:
    """A load in one line: what speaks against it first, then what it is."""
    style, said = _said(load, caller.profile)
    size = "" if load.image_bytes is None else f", {_size(load.image_bytes)}"
    source = "" if load.path is None else f" {load.path[:TEXT_LIMIT]}"
    failed = f", failed with CUresult {load.result}" if load.result else ""
    stopped = ", stopped to read it" if load.stopped else ""
    text = f"{said}; {load.function}{source}{size}{stopped}{failed}"
    return _line(at_ns, "load", caller, text, place=place, width=width, colour=colour, style=style)


def library_text(
    library: CudaLibrary, *, found: bool, at_ns: int, width: int, colour: bool = False
) -> str:
    """A driver library that somebody maps, or that nobody maps any longer, in one line."""
    if found:
        text = f"{points_in_words(library)} of {library.path}"
        if library.problems:
            text = f"{text}; not seen: {'; '.join(library.problems)}"
    else:
        text = f"nobody maps {library.path} any longer"
    style = "yellow" if found and library.problems else ""
    return _line(at_ns, "library", None, text, width=width, colour=colour, style=style)


def launches_text(
    window: LaunchWindow,
    caller: Caller,
    fit: LaunchFit | None = None,
    *,
    at_ns: int,
    width: int,
    place: str = "",
    colour: bool = False,
) -> str:
    """The launches of a window in one line, the most launched kernels named."""
    seconds = max((window.until_ns - window.from_ns) / 1e9, 0.0)
    total = sum(one.launches for one in window.kernels)
    graphs = f" and {window.graph_launches:,} graphs" if window.graph_launches else ""
    text = f"{total:,}{graphs} in {seconds:.1f} s"
    named = ", ".join(kernels_in_words(window.kernels, total))
    if named:
        text += f": {named}"
    style = ""
    if fit is not None and fit.words:
        text, style = f"DOES NOT FIT: {fit.words[0]}; {text}", "red"
    return _line(
        at_ns, "launches", caller, text, place=place, width=width, colour=colour, style=style
    )


def _line(
    at_ns: int,
    kind: str,
    caller: Caller | None,
    text: str,
    *,
    width: int,
    place: str = "",
    colour: bool,
    style: str = "",
) -> str:
    width = max(width, NARROWEST)
    lead = f"{_clock(at_ns, exactly=width >= WIDE)} {kind:<8}"
    if caller is not None:
        room = NAME_CELLS if width >= WIDE else NARROW_NAME_CELLS
        name = pad(cut(_one_line(caller.process.comm), room), room)
        lead += f" {caller.process.pid:>7} {name}"
        if width >= WIDE:
            lead += f" {pad(cut(_one_line(place or 'host'), PLACE_CELLS), PLACE_CELLS)}"
    shown = cut(_one_line(text), width - cells(lead) - 1)
    return f"{lead} {Sheet(width, colour=colour).styled(shown, style)}\n"


def _one_line(text: str) -> str:
    return escape(text[: TEXT_LIMIT * 4])


def _clock(at_ns: int, *, exactly: bool) -> str:
    try:
        at = datetime.datetime.fromtimestamp(at_ns // 10**9, tz=datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "??:??:??" + ("    " if exactly else "")
    thousandths = f".{at_ns % 10**9 // 10**6:03d}" if exactly else ""
    return f"{at:%H:%M:%S}{thousandths}"


def _size(size: int) -> str:
    if size >= MIB:
        return f"{size / MIB:.1f} MiB"
    return f"{size / KIB:.1f} KiB" if size >= KIB else f"{size} B"


def _said(load: ModuleLoad, profile: str) -> tuple[str, str]:
    """The style and the words for a load, by the gravest of its modules."""
    if not load.modules:
        why = load.missed or "; ".join(load.problems) or "no module in it"
        return "yellow", f"{'BYTES MISSED' if load.missed else 'NOT READ'}: {why[:TEXT_LIMIT]}"
    grave, module = max(((_grave(one, profile), one) for one in load.modules), key=lambda x: x[0])
    words = "HASH-LIKE" if grave == 3 else _standing(module, profile)
    named = module.kernels[0][:TEXT_LIMIT] if module.kernels else ""
    if module.kernel_count > 1:
        named = f"{named} and {module.kernel_count - 1} more".lstrip()
    more = f"; {len(load.modules) - 1} more in it" if len(load.modules) > 1 else ""
    part = f" (in part: {load.missed[:TEXT_LIMIT]})" if load.missed else ""
    image = " ".join(w for w in (module.kind, module.arch, module.digest[:DIGEST_SHOWN]) if w)
    what = f"{named}, {image}" if named else image
    return _STYLES.get(grave, ""), f"{words}: {what}{more}{part}"


def _standing(module: LoadedModule, profile: str) -> str:
    known = standing_in(module, profile)
    if known is None or known.not_compared:
        return "not compared"
    words = _STANDINGS[known.standing]
    # Of a process that declares nothing, most code is in no baseline.
    return words.upper() if known.standing == "unknown" and profile else words


def _grave(module: LoadedModule, profile: str) -> int:
    known = standing_in(module, profile)
    if known is not None and known.standing in ("known", "rebuilt", "driver"):
        return 0
    if module.answer == HASH_LIKE:
        return 3
    return 1 if known is not None and known.standing == "jit" else 2


def kernels_in_words(kernels: Sequence[KernelUse], total: int) -> Iterator[str]:
    """The most launched kernels, each with its share of all launches."""
    most = sorted(kernels, key=lambda one: -one.launches)
    for one in most[:KERNELS_SHOWN]:
        share = f" ({100 * one.launches // total}%)" if total else ""
        yield f"{one.name[:TEXT_LIMIT] or 'without a name'} {one.launches:,}{share}"
    if len(most) > KERNELS_SHOWN:
        yield f"{len(most) - KERNELS_SHOWN} more"


def points_in_words(library: CudaLibrary) -> str:
    """How much of a library is attached to."""
    dear = f", {len(library.at_start)} of them dear (+0)" if library.at_start else ""
    return f"{len(library.probed)} entry points{dear}"
