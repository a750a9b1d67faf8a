"""Algorithms named by their constants: known values, half a table, and words that prove nothing."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from gpuwarden.code.constants import FNV_PRIME, families, known_words, memberships, named_algorithms

TABLES = {one.key: one for one in families()}
WORDS = {
    "sha256": 0x428A2F98, "iv256": 0x6A09E667, "sha512": 0xD728AE22, "iv512": 0xF3BCC908,
    "md5": 0xD76AA478, "sha1rmd": 0x5A827999, "keccak": 0x8000808B, "pi": 0x243F6A88,
    "aesT": 0xA56363C6, "aesS": 0x7B777C63, "salsa": 0x61707865, "sip": 0x736F6D65,
    "skein": 0xFC6DF1C4 ^ 0xFC6DF1C4 ^ 0x1BD11BDA, "whirl_groestl": 0xC632F4A5,
    "sm3": 0x79CC4519, "zpow": 0x7361635A,
}  # fmt: skip
"""A word of each table as its standard prints it."""


def words(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


@pytest.mark.parametrize("key", WORDS)
def test_tables_hold_the_words_of_their_standards(key: str) -> None:
    assert WORDS[key] in TABLES[key].words


@pytest.mark.parametrize(
    ("key", "count", "digest"),
    [("sha256", 64, "sha256"), ("md5", 64, "md5"), ("sha512", 160, "sha512"), ("aesT", 1020, "")],
)
def test_tables_are_whole(key: str, count: int, digest: str) -> None:
    assert len(TABLES[key].words) == count
    assert not digest or digest in hashlib.algorithms_guaranteed


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("sha256", "SHA-256"), ("sha512", "SHA-512"), ("md5", "MD5"), ("keccak", "Keccak"),
        ("aesT", "AES"), ("aesS", "AES"), ("skein", "Skein"), ("pi", "BLAKE or Blowfish"),
        ("sha1rmd", "SHA-1 or RIPEMD-160"),
    ],
)  # fmt: skip
def test_half_a_table_names_its_algorithm_and_a_third_does_not(key: str, name: str) -> None:
    table = TABLES[key].words
    assert name in named_algorithms(words(*table[: (len(table) + 1) // 2]))
    assert named_algorithms(words(*table[: max(len(table) // 6, 1)])) == ()


def test_a_long_tables_name_stands_for_the_short_one_in_it() -> None:
    assert named_algorithms(words(*TABLES["sha512"].words)) == ("SHA-512",)
    both = (*TABLES["sha256"].words, *TABLES["iv256"].words)
    assert named_algorithms(words(*both)) == ("SHA-256",)


def test_sets_of_words_are_not_added_up() -> None:
    table = TABLES["md5"].words
    assert named_algorithms(words(*table[:20]), words(*table[20:40])) == ()
    assert named_algorithms(words(*table[:20]), words(*table[20:60])) == ("MD5",)


def test_random_number_generators_are_not_named() -> None:
    for key in ("philox", "murmur_xx", "xorwow_mrg", "crc32", "splitmix", "lcg64_rx", "kiss99"):
        assert named_algorithms(words(*TABLES[key].words)) == ()
    assert 0xBB67AE85 in TABLES["philox"].words
    half_with_philox = (0xBB67AE85, *TABLES["iv256"].words[:3])
    assert named_algorithms(words(*half_with_philox)) == ()


def test_kiss99_with_fnv_is_progpow_like() -> None:
    kiss = TABLES["kiss99"].words
    assert named_algorithms(words(*kiss, FNV_PRIME)) == ("ProgPoW",)
    assert named_algorithms(words(*kiss[:2], FNV_PRIME)) == ()


def test_a_word_of_several_tables_counts_in_each() -> None:
    index, family = memberships(words(0x428A2F98, 0xBB67AE85))
    keys = [families()[number].key for number in family]
    assert index.tolist() == [0, 0, 1, 1, 1]
    assert keys == ["sha256", "sha512", "iv256", "iv512", "philox"]


def test_known_words_are_found_among_many() -> None:
    rng = np.random.default_rng(1)
    many = rng.integers(0, 1 << 32, 50_000, np.uint32)
    table = {word for one in families() for word in one.words}
    assert set(many[known_words(many)].tolist()) == set(many.tolist()) & table
    every = words(*sorted(table))
    assert known_words(every).tolist() == list(range(len(every)))
    assert known_words(words()).tolist() == []
