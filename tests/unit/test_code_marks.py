"""The marks of GPU code, where they are no more than words in a program or a text."""

from __future__ import annotations

import pytest

from gpuwarden.code.extract import modules_in
from gpuwarden.code.module import Place
from tests.support import gpu_images as build

TEXTS = {
    "a message of a program that reads bundles": b"magic __CLANG_OFFLOAD_BUNDLE__ is missing\0",
    "the same at the end": b"__CLANG_OFFLOAD_BUNDLE__",
    "a table of magics": b"\x50\xed\x55\xba\0\0\0\0\xb1\x43\x62\x46CCOB\0\x7fELF\0",
    "a page about PTX": b"A file begins with .version 8.0 and has a .target behind it.",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_mark_alone_is_neither_a_module_nor_a_problem(text: str) -> None:
    held = b"some words, " * 40 + TEXTS[text] + bytes(16)
    assert list(modules_in(held, Place(target="sample"))) == []
    assert list(modules_in(b"\x7fELF\2\1\1" + held, Place(target="sample"))) == []


def test_a_bundle_behind_such_a_word_is_found() -> None:
    image = build.amd_code_object()
    held = TEXTS["a message of a program that reads bundles"] + bytes(6)
    held += build.bundle({"hipv4-amdgcn-amd-amdhsa--gfx90a": image})
    (found,) = modules_in(held, Place(target="sample"))
    assert bytes(found.image()) == image  # type: ignore[union-attr]
