"""What the tracer's messages come to: contexts, loads, launches and limits of each process."""

from __future__ import annotations

from msgspec.structs import replace

from gpuwarden.cuda.book import BEFORE, GRAPHS, PROCESSES_LIMIT, RAW, CudaBook
from gpuwarden.cuda.messages import (
    ContextSeen,
    LaunchesSeen,
    LibraryGone,
    LibrarySeen,
    LoadCame,
    LoadSeen,
    ProcessEnded,
    ProcessMaps,
)
from gpuwarden.model import (
    CudaLibrary,
    CudaProcess,
    KernelUse,
    LaunchWindow,
    LoadedModule,
    ModuleLoad,
)
from gpuwarden.probes.cuda.records import ContextCall
from gpuwarden.probes.events import ProcessIdentity

START_NS = 5_000_000_000
TICKS = 500
KEY = (42, TICKS)
LIBRARY = (8, 1, 77)


def _identity(pid: int = 42) -> ProcessIdentity:
    return ProcessIdentity(pid=pid, start_time_ns=START_NS, comm="python3")


def _context(
    call: str, *, handle: int = 1, device: int | None = 0, result: int = 0, at: int = 1
) -> ContextSeen:
    return ContextSeen(
        call=ContextCall(
            at_ns=at,
            process=_identity(),
            thread_id=42,
            function="f",
            call=call,  # type: ignore[arg-type]
            handle=handle,
            device=device,
            result=result,
        )
    )


def _load(number: int, *modules: LoadedModule, missed: str = "", pid: int = 42) -> LoadSeen:
    load = ModuleLoad(
        pid=pid,
        start_time_ticks=TICKS,
        number=number,
        at_ns=number,
        thread_id=pid,
        function="cuModuleLoadData",
        missed=missed,
        modules=modules,
    )
    return LoadSeen(process=_identity(pid), load=load)


def _launches(*kernels: KernelUse, graphs: int = 0) -> LaunchesSeen:
    window = LaunchWindow(
        pid=42,
        start_time_ticks=TICKS,
        from_ns=0,
        until_ns=1,
        kernels=kernels,
        graph_launches=graphs,
    )
    return LaunchesSeen(start_time_ns=START_NS, window=window)


def _process(book: CudaBook) -> CudaProcess:
    found = book.process(KEY)
    assert found is not None
    return found


def _live(book: CudaBook) -> list[tuple[str, int | None]]:
    return [(c.kind, c.device) for c in _process(book).contexts if c.ended_ns is None]


def test_a_primary_context_is_one_until_it_is_released_as_often_as_retained() -> None:
    book = CudaBook()
    assert book.take(_context("retained", handle=7)) == KEY
    assert book.take(_context("retained", handle=7)) is None
    assert _live(book) == [("primary", 0)]
    book.take(_context("released"))
    assert _live(book) == [("primary", 0)]
    book.take(_context("released", at=9))
    assert _live(book) == []
    assert _process(book).contexts[0].ended_ns == 9


def test_primary_contexts_of_two_devices_are_two() -> None:
    book = CudaBook()
    book.take(_context("retained", device=0))
    book.take(_context("retained", device=1))
    assert _live(book) == [("primary", 0), ("primary", 1)]
    book.take(_context("reset", device=0))
    assert _live(book) == [("primary", 1)]


def test_created_contexts_end_by_their_handle() -> None:
    book = CudaBook()
    book.take(_context("created", handle=10))
    book.take(_context("created", handle=11))
    book.take(_context("green", handle=12, device=None))
    book.take(_context("destroyed", handle=10, device=None))
    assert _live(book) == [("created", 0), ("green", None)]


def test_a_context_that_was_not_made_is_none() -> None:
    book = CudaBook()
    assert book.take(_context("created", result=2)) is None
    assert _process(book).contexts == ()


def test_loads_are_counted_and_modules_kept_once() -> None:
    book = CudaBook()
    module = LoadedModule(digest="aa", kind="cubin")
    assert book.take(_load(1, module)) == KEY
    book.take(_load(2, module))
    book.take(_load(3, missed="the ring was full"))
    book.take(LoadCame(pid=42, start_time_ns=START_NS, number=2, handle=99, result=0))
    found = _process(book)
    assert (found.loads, found.missed_loads, found.missed) == (3, 1, ("the ring was full",))
    used = book.used(KEY)
    assert used is not None
    assert list(used.modules) == ["aa"]
    assert used.loads[2].handle == 99
    assert used.loads[1].handle is None


def test_launches_add_up_and_graphs_are_named_as_a_limit() -> None:
    book = CudaBook()
    book.take(_launches(KernelUse(name="gemm", launches=5), KernelUse(name="add", launches=1)))
    assert GRAPHS not in _process(book).limits
    book.take(_launches(KernelUse(name="gemm", launches=2), graphs=3))
    found = _process(book)
    assert (found.launches, found.graph_launches) == (8, 3)
    assert [(one.name, one.launches) for one in found.kernels] == [("gemm", 7), ("add", 1)]
    assert GRAPHS in found.limits


def test_what_was_not_seen_is_said() -> None:
    book = CudaBook()
    library = CudaLibrary(device="8:1", inode=77, path="/x/libcuda.so.1", problems=("no slots",))
    book.take(LibrarySeen(key=LIBRARY, library=library))
    book.take(
        ProcessMaps(pid=42, start_time_ticks=TICKS, libraries=(LIBRARY,), before=True, at_ns=123)
    )
    found = _process(book)
    assert found.libraries == (library,)
    assert found.seen_since_ns == 123
    assert found.limits == (BEFORE, "/x/libcuda.so.1: no slots", RAW)
    book.take(LibraryGone(key=LIBRARY))
    assert _process(book).libraries == ()


def test_ended_processes_make_room_first() -> None:
    book = CudaBook()
    for pid in range(1, PROCESSES_LIMIT + 1):
        book.take(_load(pid, pid=pid))
    book.take(ProcessEnded(pid=7, start_time_ticks=TICKS))
    book.take(_load(0, pid=PROCESSES_LIMIT + 1))
    assert book.used((7, TICKS)) is None
    assert book.used((1, TICKS)) is not None
    assert (len(book.known()), book.crowded_out) == (PROCESSES_LIMIT, 1)


def test_another_process_of_the_same_number_is_another() -> None:
    book = CudaBook()
    book.take(_load(1))
    other = _load(2)
    other = replace(other, load=replace(other.load, start_time_ticks=TICKS + 1))
    book.take(other)
    assert _process(book).loads == 1


def test_a_load_that_the_driver_refused_is_not_missed() -> None:
    book = CudaBook()
    book.take(_load(1, missed="nothing says how long it is"))
    book.take(_load(2, missed="nothing says how long it is"))
    assert (book.missed, _process(book).missed_loads) == (2, 2)
    book.take(LoadCame(pid=42, start_time_ns=START_NS, number=1, handle=0, result=200))
    book.take(LoadCame(pid=42, start_time_ns=START_NS, number=2, handle=5, result=0))
    assert (book.missed, _process(book).missed_loads) == (1, 1)
    refused = _load(3, missed="nothing says how long it is")
    book.take(replace(refused, load=replace(refused.load, result=200)))
    assert (book.missed, _process(book).loads) == (1, 3)


def test_launches_from_before_their_module_was_examined_are_of_it() -> None:
    book = CudaBook()
    book.take(_launches(KernelUse(name="gemm", launches=5)))
    book.take(_launches(KernelUse(name="gemm", digest="aa", launches=2)))
    assert _process(book).kernels == (KernelUse(name="gemm", digest="aa", launches=7),)
    # Of two modules that have it, it is not known which.
    book.take(_launches(KernelUse(name="gemm", digest="bb", launches=1)))
    assert [(one.digest, one.launches) for one in _process(book).kernels] == [
        ("", 5),
        ("aa", 2),
        ("bb", 1),
    ]
