"""A 5 GB image archive through `code scan`: peak memory of parent and children, and speed.

The archive is made as it is read and never kept: the scan reads a pipe, as it does for an image by
name. With --file it is written to a file first, which the children share out between them. Each
layer has two thousand small files and a library as large as libtorch_cuda.so, larger than what a
child holds of a file at once.

    .venv/bin/python bench/code_image.py [--gigabytes 5] [--gzip] [--file DIRECTORY]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuwarden.code.module import Place
from gpuwarden.codescan.scan import Options, scan_code
from gpuwarden.codescan.targets import Target, Targets, closing
from gpuwarden.codescan.tasks import FileTask
from gpuwarden.codescan.worker import Job
from tests.support.code_scans import code
from tests.support.gpu_images import EntryImage, fatbin

MIB = 1 << 20
LIBRARY_BYTES = 700 * MIB
LIBRARY_IMAGES = 8
SMALL_FILES = 2000
LIMIT_BYTES = 500 * 1000 * 1000
SAMPLE_SECONDS = 0.02


def entry(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


def rounded(size: int) -> int:
    return size + -size % tarfile.BLOCKSIZE


def pieces_of_library(seed: int) -> Iterator[bytes]:
    """Fatbins with as much between them that is none, in 1 MiB pieces."""
    filler = random.Random(seed).randbytes(MIB)
    pieces = []
    for number in range(LIBRARY_IMAGES):
        image = code(f"kernel {seed} {number}") + filler[: 300_000 + number]
        body = fatbin([EntryImage("cubin", image, codec="zstd")] * 3)
        pieces += [body.ljust(MIB, b"\0"), filler]
    for number in range(LIBRARY_BYTES // MIB):
        yield pieces[number % len(pieces)]


def layer(seed: int) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """Names, sizes and contents of its files."""
    for number in range(SMALL_FILES):
        text = f"value = {number}  # {seed}\n".encode() * (number % 200 + 1)
        yield f"usr/lib/python3/p{seed}/m{number}.py", len(text), iter((text,))
    yield f"usr/lib/libbig{seed}.so", LIBRARY_BYTES, pieces_of_library(seed)


def archive(gigabytes: float) -> Iterator[bytes]:
    """What `docker save` writes of an image of about that size."""
    layers = max(1, round(gigabytes * 1000**3 / LIBRARY_BYTES))
    paths = [f"{number:064x}/layer.tar" for number in range(layers)]
    for seed, path in enumerate(paths):
        size = sum(tarfile.BLOCKSIZE + rounded(size) for _, size, _ in layer(seed))
        yield entry(path, size + 2 * tarfile.BLOCKSIZE)
        for name, file_size, contents in layer(seed):
            yield entry(name, file_size)
            yield from contents
            yield bytes(-file_size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)
    manifest = json.dumps([{"Config": "", "RepoTags": ["bench:1"], "Layers": paths}]).encode()
    yield entry("manifest.json", len(manifest)) + manifest
    yield bytes(-len(manifest) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


def gzipped(pieces: Iterator[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(1, wbits=31)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def produce(descriptor: int, pieces: Iterator[bytes]) -> int:
    """A process that writes the archive; its pid."""
    pid = os.fork()
    if pid == 0:
        with os.fdopen(descriptor, "wb", MIB) as out:
            for piece in pieces:
                out.write(piece)
        os._exit(0)
    os.close(descriptor)
    return pid


def scan(target: Target, targets: Targets, answer: int) -> int:
    """A process that scans, so that its memory is nobody else's; its pid."""
    pid = os.fork()
    if pid == 0:
        report = scan_code([target], targets.numbers, None, Options(kernels=False))
        [told] = report.targets
        raw = json.dumps(
            [told.what, told.modules, len(report.modules), len(report.problems), told.read_bytes]
        )
        os.write(answer, raw.encode())
        os._exit(0)
    return pid


def memory(pid: int) -> int:
    """Bytes that are this process's own: neither files' pages nor shared before a fork."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return 1024 * sum(
        int(fields[name].split()[0]) for name in ("Private_Dirty", "Swap") if name in fields
    )


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def watch(pid: int) -> tuple[int, int, int, float]:
    """Peaks until it ends: of all together, of the parent, of a child; and their CPU time."""
    together = parent = child = 0
    while (ended := os.wait4(pid, os.WNOHANG))[0] == 0:
        own, others = memory(pid), [memory(one) for one in children(pid)]
        together = max(together, own + sum(others))
        parent, child = max(parent, resident(pid)), max(child, *map(resident, children(pid)), 0)
        time.sleep(SAMPLE_SECONDS)
    return together, parent, child, ended[2].ru_utime + ended[2].ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--file", metavar="DIRECTORY", help="write it to a file there first")
    asked = parser.parse_args()
    pieces = archive(asked.gigabytes)
    pieces = gzipped(pieces) if asked.gzip else pieces
    targets = Targets(2)
    if asked.file:
        with tempfile.NamedTemporaryFile(dir=asked.file, suffix=".tar") as file:
            os.waitpid(produce(os.dup(file.fileno()), pieces), 0)
            return told(targets.target(file.name), targets)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, MIB)
    producer = produce(writer, pieces)
    task = FileTask(number=next(count()), place=Place(target="bench"))
    target = Target("bench", "image", lambda: iter([Job(task, reader, closing(reader))]))
    code_ = told(target, targets)
    os.waitpid(producer, 0)
    return code_


def told(target: Target, targets: Targets) -> int:
    answer, writer = os.pipe()
    began = time.monotonic()
    together, parent, child, cpu = watch(scan(target, targets, writer))
    seconds = time.monotonic() - began
    what, modules, different, problems, read = json.loads(os.read(answer, 1000))
    print(
        f"{what}: {read / 1000**2:,.0f} MB, {modules} modules, {different} different, "
        f"{problems} problems; {seconds:.1f} s, {read / seconds / 1000**2:,.0f} MB/s; "
        f"{cpu:.1f} s of CPU, {read / cpu / 1000**2:,.0f} MB/s of one core"
    )
    print(
        f"peak of parent and children together: {together / 1000**2:.0f} MB of their own; "
        f"resident: parent {parent / 1000**2:.0f} MB, a child {child / 1000**2:.0f} MB"
    )
    return 0 if together < LIMIT_BYTES and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
