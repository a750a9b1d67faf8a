"""Calls of the CUDA driver as JSON lines: contexts, loads, libraries, launches; for ``--events``.

Handles are written as hexadecimal text: they have 64 bits, which not every reader of JSON keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from gpuwarden.model import (
    Container,
    CudaLibrary,
    KernelUse,
    LaunchFit,
    LaunchWindow,
    LoadedModule,
    ModuleLoad,
    Process,
    ProfileStanding,
)
from gpuwarden.outputs.line_parts import container_part, parent_part, process_part, time_text
from gpuwarden.probes.cuda.records import ContextCall

CUDA_SCHEMA = "gpuwarden.cuda-event"
CUDA_VERSION = 1
MODULES_TOLD = 256
KERNELS_TOLD = 32
TEXTS_TOLD = 16
TEXT_LIMIT = 512
PATH_LIMIT = 4096

_encoder = msgspec.json.Encoder()
Document = dict[str, object]


class Caller(NamedTuple):
    """Whose call it was, and where that process runs."""

    process: Process
    parent: Process | None = None
    container: Container | None = None
    container_state: Literal["none", "known", "unknown"] = "none"
    profile: str = ""
    """The code profile of its workload; empty for none."""


def standing_in(module: LoadedModule, profile: str) -> ProfileStanding | None:
    """Where a module stands in a profile, or without one against the starter baseline.

    None where it was not compared with that profile.
    """
    return next((one for one in module.standings if one.profile == profile), None)


def context_line(call: ContextCall, caller: Caller, *, node: str, at_ns: int) -> bytes:
    """A context that was made, retained, released or destroyed, as JSON without a newline."""
    return _encoder.encode(
        {
            **_head("cuda_context", node, at_ns),
            "context": {
                "call": call.call,
                "function": _cut(call.function),
                "handle": _hexadecimal(call.handle),
                "device": call.device,
                "result": call.result,
                "thread_id": call.thread_id,
            },
            **_whose(caller),
        }
    )


def load_line(load: ModuleLoad, caller: Caller, *, node: str, at_ns: int) -> bytes:
    """A load with each module's digests and where it stands in the process's profile."""
    return _encoder.encode(
        {
            **_head("module_load", node, at_ns),
            "load": {
                "number": load.number,
                "function": _cut(load.function),
                "path": None if load.path is None else _cut(load.path, PATH_LIMIT),
                "image_bytes": load.image_bytes,
                "captured_bytes": load.captured_bytes,
                "missed": _cut(load.missed),
                "stopped": load.stopped,
                "handle": _hexadecimal(load.handle),
                "result": load.result,
                "thread_id": load.thread_id,
                "problems": _texts(load.problems),
            },
            "profile": caller.profile or None,
            "module_count": len(load.modules),
            "modules": [_module(one, caller.profile) for one in load.modules[:MODULES_TOLD]],
            **_whose(caller),
        }
    )


def library_line(
    library: CudaLibrary, state: Literal["found", "gone"], *, node: str, at_ns: int
) -> bytes:
    """A driver library that somebody maps, or that nobody maps any longer."""
    return _encoder.encode(
        {
            **_head("cuda_library", node, at_ns),
            "library": {
                "state": state,
                "path": _cut(library.path, PATH_LIMIT),
                "device": library.device,
                "inode": library.inode,
                "build_id": library.build_id,
                "soname": library.soname,
                "probed": _texts(library.probed, most=KERNELS_TOLD * 4),
                "at_start": _texts(library.at_start, most=KERNELS_TOLD * 4),
                "problems": _texts(library.problems),
            },
        }
    )


def launches_line(
    window: LaunchWindow,
    caller: Caller,
    fit: LaunchFit | None = None,
    *,
    node: str,
    at_ns: int,
) -> bytes:
    """The launches of one process in one window: all counted, the most launched ones named."""
    most = sorted(window.kernels, key=lambda one: -one.launches)
    return _encoder.encode(
        {
            **_head("launches", node, at_ns),
            "window": {
                "seconds": round((window.until_ns - window.from_ns) / 1e9, 6),
                "launches": sum(one.launches for one in window.kernels),
                "graph_launches": window.graph_launches,
                "kernel_count": len(window.kernels),
                "kernels": _kernels(most),
                "sampled": len(window.samples),
                "dropped": window.dropped,
            },
            "profile": caller.profile or None,
            "fit": None if fit is None else _fit(fit),
            **_whose(caller),
        }
    )


# ------------------------------------------------------------------ parts


def _head(kind: str, node: str, at_ns: int) -> Document:
    return {
        "schema": CUDA_SCHEMA,
        "version": CUDA_VERSION,
        "kind": kind,
        "node": node,
        "time": time_text(at_ns),
        "at_ns": at_ns,
    }


def _whose(caller: Caller) -> Document:
    return {
        "process": process_part(caller.process),
        "parent": parent_part(caller.process, caller.parent),
        "container": container_part(caller.container_state, caller.process, caller.container),
        "unread": caller.process.unread,
    }


def _module(module: LoadedModule, profile: str) -> Document:
    standing = standing_in(module, profile)
    return {
        "digest": module.digest,
        "code_digest": module.code_digest,
        "kind": module.kind,
        "arch": module.arch,
        "image_bytes": module.image_bytes,
        "offset": module.offset,
        "kernels": _texts(module.kernels),
        "kernel_count": module.kernel_count,
        "standing": None if standing is None else standing.standing,
        "known_as": "" if standing is None else _cut(standing.known_as),
        "not_compared": None if standing is None else _cut(standing.not_compared),
        "answer": _cut(module.answer),
        "score": module.score,
        "reasons": _texts(module.reasons),
        "consistent_with": _texts(module.consistent_with),
        "broken": _cut(module.broken),
    }


def _fit(fit: LaunchFit) -> Document:
    return {
        "explained_share": fit.explained_share,
        "outside": _kernels(fit.outside),
        "second_stream": _kernels(fit.second_stream),
        "second_period_seconds": fit.second_period_seconds,
        "unexplained": _kernels(fit.unexplained),
        "words": _texts(fit.words),
        "since_ns": fit.since_ns,
    }


def _kernels(kernels: Iterable[KernelUse]) -> list[Document]:
    return [
        {"name": _cut(one.name), "digest": one.digest, "launches": one.launches}
        for _, one in zip(range(KERNELS_TOLD), kernels, strict=False)
    ]


def _texts(texts: tuple[str, ...], most: int = TEXTS_TOLD) -> list[str]:
    return [_cut(text) for text in texts[:most]]


def _cut(text: str, limit: int = TEXT_LIMIT) -> str:
    """Bounded; what is no Unicode, in the name of a file, is written as an escape."""
    return text[:limit].encode("utf-8", "backslashreplace").decode()


def _hexadecimal(handle: int | None) -> str | None:
    return None if handle is None else f"{handle:#x}"
