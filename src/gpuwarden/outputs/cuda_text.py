"""What `gpuwarden trace` tells a person: a line each call, and at the end what it all was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpuwarden.model import CudaContext, CudaProcess, GpuModule, Process
from gpuwarden.outputs.cuda_event_text import (
    DIGEST_SHOWN,
    HASH_LIKE,
    NARROWEST,
    TEXT_LIMIT,
    context_text,
    kernels_in_words,
    launches_text,
    library_text,
    load_text,
    points_in_words,
)
from gpuwarden.outputs.sheet import Sheet
from gpuwarden.outputs.words import moment

__all__ = [
    "Traced",
    "closing_table",
    "context_text",
    "launches_text",
    "library_text",
    "load_text",
]

CONTEXTS_SHOWN = 8
MODULES_SHOWN = 8


class Traced(NamedTuple):
    """One process as the closing table tells of it."""

    cuda: CudaProcess
    process: Process | None = None
    place: str = ""
    profile: str = ""
    modules: tuple[GpuModule, ...] = ()
    """Those that it loaded and that are not simply known, the gravest first."""


def closing_table(traced: Iterable[Traced], *, width: int, colour: bool) -> str:
    """What was seen of each process, and what could not be, in words."""
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    found = sorted(traced, key=lambda one: (one.cuda.pid, one.cuda.start_time_ticks))
    sheet.blank()
    if not found:
        sheet.add("No process that uses a CUDA driver library was seen.")
    for number, one in enumerate(found):
        if number:
            sheet.blank()
        _close(sheet, one)
    return sheet.text()


def _close(sheet: Sheet, one: Traced) -> None:
    cuda = one.cuda
    name = one.process.comm if one.process is not None else "not read"
    parts = [name, one.place, f"profile {one.profile}" if one.profile else ""]
    who = ", ".join(part[:TEXT_LIMIT] for part in parts if part)
    sheet.lead(f"pid {cuda.pid} ", who, hang=2, style="bold")
    for library in cuda.libraries:
        _row(sheet, "library", f"{library.path[:TEXT_LIMIT]}, {points_in_words(library)}")
    if not cuda.libraries:
        _row(sheet, "library", "none that is known: its calls cannot be seen", "red")
    _row(sheet, "contexts", "; ".join(_contexts(cuda.contexts)) or "none seen")
    _row(sheet, "loads", _loads(cuda), "yellow" if cuda.missed_loads else "")
    for module in one.modules[:MODULES_SHOWN]:
        style = "bold red" if module.answer == HASH_LIKE else ""
        sheet.add(_module(module), indent=12, hang=2, style=style)
    if len(one.modules) > MODULES_SHOWN:
        more = len(one.modules) - MODULES_SHOWN
        sheet.add(f"{more} more that are not simply known", indent=12)
    _row(sheet, "launches", _launches(cuda))
    if cuda.fit is not None:
        share = f"{100 * cuda.fit.explained_share:.1f}% explained by {cuda.fit.profile}"
        words = "; ".join((share, *cuda.fit.words))
        _row(sheet, "fit", words[: TEXT_LIMIT * 4], "red" if cuda.fit.words else "")
    for text in _unseen(cuda):
        _row(sheet, "not seen", text[: TEXT_LIMIT * 2])


def _row(sheet: Sheet, name: str, text: str, style: str = "") -> None:
    sheet.add(f"{name:<9} {text}", indent=2, hang=10, style=style)


def _contexts(contexts: Sequence[CudaContext]) -> Iterator[str]:
    live = [one for one in contexts if one.ended_ns is None]
    for one in live[:CONTEXTS_SHOWN]:
        device = "" if one.device is None else f" on device {one.device}"
        yield f"{one.kind}{device} since {moment(one.made_ns)}"
    if len(live) > CONTEXTS_SHOWN:
        yield f"{len(live) - CONTEXTS_SHOWN} more"
    if len(contexts) > len(live):
        yield f"{len(contexts) - len(live)} ended"


def _loads(cuda: CudaProcess) -> str:
    if not cuda.loads:
        return "none seen"
    text = f"{cuda.loads:,}; {cuda.known_loads:,} modules known"
    if cuda.missed_loads:
        why = f" ({'; '.join(cuda.missed)[:TEXT_LIMIT]})" if cuda.missed else ""
        text += f"; the bytes of {cuda.missed_loads:,} were missed{why}"
    return text


def _module(module: GpuModule) -> str:
    named = ", ".join(name[:TEXT_LIMIT] for name in module.kernels[:3])
    what = (module.kind, module.arch, module.digest[:DIGEST_SHOWN], named)
    standing = f"{module.standing}, {module.answer}" if module.answer else module.standing
    since = f", since {moment(module.loaded_at_ns)}" if module.loaded_at_ns is not None else ""
    return f"{' '.join(word for word in what if word)}: {standing}{since}"


def _launches(cuda: CudaProcess) -> str:
    graphs = f" and {cuda.graph_launches:,} graphs" if cuda.graph_launches else ""
    if not cuda.launches:
        return f"none seen{graphs}"
    return f"{cuda.launches:,}{graphs}: {', '.join(kernels_in_words(cuda.kernels, cuda.launches))}"


def _unseen(cuda: CudaProcess) -> Iterator[str]:
    """What silence of this process does not mean."""
    if cuda.before and not cuda.limits:
        yield "contexts and loads from before it was watched"
    yield from cuda.limits
