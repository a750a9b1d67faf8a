"""How fast features are computed: kernels and megabytes of machine code a second on one core.

    python bench/feature_speed.py LIBRARY_OR_WHEEL… [--columns classifier|all] [--megabytes 300]

Images are decompressed before the clock starts; kernels of every size count, those too small to be
judged too. Time is that of this process's one thread, so that neighbours do not count.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from gpuwarden.code.classify.model import load_model
from gpuwarden.code.extract import modules_in
from gpuwarden.code.module import Place, Problem
from gpuwarden.code.sass import COLUMNS, kernel_features
from gpuwarden.code.sass.opcodes import NEWEST, OLDEST
from gpuwarden.code.sass.sections import read_sections

ROUNDS = 3
"""The best counts: other work on the machine only takes away."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--columns", choices=("classifier", "all"), default="classifier")
    parser.add_argument("--megabytes", type=int, default=300, help="of images, at most")
    options = parser.parse_args()
    columns = COLUMNS if options.columns == "all" else load_model().columns
    for file in options.files:
        images = list(_images(file, options.megabytes << 20))
        if not images:
            print(f"{file.name}: no cubin of sm_{OLDEST} or later")
            continue
        kernel_features(images[0], columns)
        _report(file.name, images, columns)


def _report(name: str, images: list[bytes], columns: tuple[str, ...]) -> None:
    kernels, instructions, seconds = min(
        (_once(images, columns) for _ in range(ROUNDS)), key=lambda once: once[2]
    )
    text = sum(one.size for image in images for one in read_sections(image).code)
    print(
        f"{name}: {len(images)} modules, {kernels:,} kernels, {len(columns)} columns: "
        f"{kernels / seconds:,.0f} kernels/s, {text / seconds / 1e6:,.0f} MB/s of code, "
        f"{seconds / max(instructions, 1) * 1e9:.0f} ns an instruction"
    )


def _once(images: list[bytes], columns: tuple[str, ...]) -> tuple[int, int, float]:
    """Kernels, instructions and seconds of one pass."""
    kernels = instructions = 0
    start = time.process_time()
    for image in images:
        table = kernel_features(image, columns)
        kernels += len(table.kernels)
        instructions += int(table.instructions.sum())
    return kernels, instructions, time.process_time() - start


def _images(file: Path, most: int) -> Iterator[bytes]:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as wheel:
            libraries = [wheel.read(name) for name in wheel.namelist() if ".so" in name]
    else:
        libraries = [file.read_bytes()]
    total = 0
    for data in libraries:
        for located in modules_in(data, Place(target=file.name)):
            if isinstance(located, Problem) or located.kind != "cubin":
                continue
            image = bytes(located.image())
            if not OLDEST <= read_sections(image).arch <= NEWEST:
                continue
            yield image
            total += len(image)
            if total > most:
                return


if __name__ == "__main__":
    main()
