"""GPU code of every form, built here by NVIDIA's compiler from ``kernels/*.cu``.

What was built once is kept under ``build/samples``, by a digest of the sources, the arguments and
the compiler's version. The compiler, its linker and its lister come with the test environment; the
host compiler, which nvcc preprocesses with, comes from the distribution.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.support.packages import require

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path(__file__).with_name("kernels")
CUDA = Path(sysconfig.get_path("purelib")) / "nvidia/cu13"
ARCHES = "75 80 86 87 88 89 90 90a 100 100a 100f 103 103a 107 110 120 120a 121".split()
"""All that the compiler makes code for, suffixes too."""
CODECS = {"zlib": 1, "lz4": 2, "lz4-frame": 3, "lz4-high": 4, "zstd": 5}
"""What fatbinary calls its codecs: ``lz4-high`` is LZ4 block, compressed harder."""
TILE_IR = b"\x7fTileIR\0" + bytes((13, 1, 0, 0)) + b"\x00\x01\x02\x03" * 40
"""The head of a Tile IR module and nothing sensible after it; fatbinary takes it for one."""

_CACHE = ROOT / "build/samples"

Argument = str | Path | tuple[str, Path]
"""A pair is one argument, an option with the path that it names."""


def kernel(name: str) -> Path:
    """One of the sources."""
    return KERNELS / f"{name}.cu"


def kernel_names() -> list[str]:
    """The sources that compile by themselves."""
    return sorted(path.stem for path in KERNELS.glob("*.cu") if path.stem != "calls")


def made(output: str, tool: str, *arguments: Argument, at: Path | None = None) -> Path:
    """The file ``output`` of a CUDA ``tool``, whose inputs are the paths among ``arguments``.

    It runs in a folder of its own, or in ``at``: then nothing is kept.
    """
    if at is not None:
        _run(CUDA / "bin" / tool, *arguments, *_naming(tool, output), at=at)
        return at / output
    key = hashlib.sha256(_version(tool))
    for argument in arguments:
        for part in argument if isinstance(argument, tuple) else (argument,):
            key.update(_content(part) if isinstance(part, Path) else part.encode())
            key.update(b"\0")
    kept = _CACHE / key.hexdigest()[:20] / output
    if not kept.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            _run(CUDA / "bin" / tool, *arguments, *_naming(tool, output), at=Path(folder))
            kept.parent.mkdir(exist_ok=True)
            Path(folder, output).replace(kept)
    return kept


def cubin(source: str | Path, sm: str = "80", *options: str, at: Path | None = None) -> Path:
    """A cubin of ``sm``; ``source`` is the name of a kernel file, or a path."""
    return _compiled(source, "cubin", f"-cubin -arch=sm_{sm}", options, at)


def ptx(source: str | Path, sm: str = "80", *options: str, at: Path | None = None) -> Path:
    """PTX of ``compute_<sm>``."""
    return _compiled(source, "ptx", f"-ptx -arch=compute_{sm}", options, at)


def lto_ir(source: str | Path, sm: str = "80", *options: str, at: Path | None = None) -> Path:
    """LTO-IR, as nvcc leaves it in a file of its own."""
    virtual = f"-ltoir -gencode arch=compute_{sm},code=lto_{sm}"
    return _compiled(source, "ltoir", virtual, options, at)


def fatbin(
    source: str | Path,
    codes: Iterable[str] = ("sm_80", "sm_90", "compute_90"),
    *options: str,
    at: Path | None = None,
) -> Path:
    """A fatbin with a module for each of ``codes``: ``sm_80``, ``compute_90``, ``lto_80``."""
    return _compiled(source, "fatbin", "-fatbin", (*gencodes(codes), *options), at)


def gencodes(codes: Iterable[str]) -> tuple[str, ...]:
    """nvcc's arguments that ask for ``codes``."""
    wanted = []
    for code in codes:
        kind, number = code.split("_")
        wanted += ["-gencode", f"arch=compute_{number},code={kind}_{number}"]
    return tuple(wanted)


def packed(*images: Path, sm: str = "80", options: Iterable[str] = ()) -> Path:
    """A fatbin that ``fatbinary`` makes of images, whose names' endings tell their kinds."""
    kinds = {".cubin": "elf", ".ptx": "ptx", ".ltoir": "nvvm", ".tileir": "tileir"}
    told = [(f"--image3=kind={kinds[image.suffix]},sm={sm},file=", image) for image in images]
    return made("packed.fatbin", "fatbinary", "-64", *options, *told)


def compressed(codec: str, *images: Path, sm: str = "80") -> Path:
    """A fatbin whose images are all compressed by one of ``CODECS``."""
    return packed(*images, sm=sm, options=("-compress-all", f"-compress-algo={CODECS[codec]}"))


def host_object(source: str | Path, *options: str, at: Path | None = None) -> Path:
    """A host's object file that carries its fatbin."""
    return _compiled(source, "o", "-c -Xcompiler -fPIC", options, at)


def library(sources: Iterable[str | Path], *options: str, relocatable: bool = False) -> Path:
    """A shared library; its calls into the runtime stay open, for none is linked."""
    told = f"-shared -Xcompiler -fPIC -cudart none{' -rdc=true' * relocatable}".split()
    return made("sample.so", "nvcc", *told, *options, *map(_source, sources))


def executable(sources: Iterable[str | Path], *options: str, relocatable: bool = False) -> Path:
    """A program with the runtime inside; its ``main`` does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        entry = Path(folder, "main.c")
        entry.write_text("int main(void) { return 0; }\n")
        told = ["-rdc=true"] if relocatable else []
        return made("sample", "nvcc", *told, *options, entry, *map(_source, sources))


def archive(*members: Path) -> Path:
    """A Unix archive (.a) of files, their names numbered where they repeat."""
    key = hashlib.sha256(b"ar" + b"".join(map(_content, members))).hexdigest()[:20]
    kept = _CACHE / key / "sample.a"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            for index, member in enumerate(members):
                shutil.copyfile(member, Path(folder, f"{index}-{member.name}"))
            _run(Path("ar"), "rcsD", "sample.a", *sorted(os.listdir(folder)), at=Path(folder))
            Path(folder, "sample.a").replace(kept)
    return kept


def tile_ir() -> Path:
    """A file that fatbinary takes for Tile IR; there is no compiler for it here."""
    kept = _CACHE / "sample.tileir"
    kept.parent.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(TILE_IR)
    return fresh.replace(kept)


def _compiled(
    source: str | Path, ending: str, how: str, options: Iterable[str], at: Path | None
) -> Path:
    path = _source(source)
    return made(f"{path.stem}.{ending}", "nvcc", *how.split(), *options, path, at=at)


def _source(source: str | Path) -> Path:
    return source if isinstance(source, Path) else kernel(source)


def _content(path: Path) -> bytes:
    """What a source is made of; the name too, which modules note."""
    headers = sorted(path.parent.glob("*.cuh")) if path.suffix == ".cu" else []
    return b"\0".join((path.name.encode(), *(each.read_bytes() for each in (path, *headers))))


def _naming(tool: str, output: str) -> tuple[str, str]:
    return "-create" if tool == "fatbinary" else "-o", output


@cache
def _version(tool: str) -> bytes:
    """Which one it is; all but ``bin2c`` tell."""
    binary = CUDA / "bin" / tool
    return subprocess.run([binary, "--version"], capture_output=True, check=True).stdout


def _run(tool: Path, *arguments: Argument, at: Path) -> None:
    if tool.name == "nvcc":
        _host_compiler()
    told = ["".join(map(str, each)) if isinstance(each, tuple) else each for each in arguments]
    done = subprocess.run(
        [tool, *told], cwd=at, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise RuntimeError(f"{tool.name} {' '.join(map(str, told))}: {done.stderr}")


@cache
def _host_compiler() -> None:
    require("g++")
