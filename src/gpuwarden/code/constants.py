"""Words that algorithms are known by, to name an algorithm, never to accuse code.

They are computed from what the standards derive them from where there is such a rule, and written
down where there is none. Half of a table or more says "constants consistent with": single words
mean little, since 0xBB67AE85 is of SHA-256, BLAKE2 and Philox, and every hash table mixes with
MurmurHash's. 64-bit words count as two halves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Words = npt.NDArray[np.uint32]

MASK = 0xFFFFFFFF
SHARE_TO_NAME = 0.5
FEW = 8
"""A table of fewer words names its algorithm only when all of them are there."""
FILTER_BITS = 16
FNV_PRIME = 0x01000193


class Family(Struct, frozen=True):
    """One table of words, and the algorithm it names; none where it names nothing worth saying."""

    key: str
    words: tuple[int, ...]
    algorithm: str = ""
    implies: tuple[str, ...] = ()
    """Tables that say no more than this one, and are not named beside it."""
    enough: int = 0
    """Words that name the algorithm; 0 for half the table."""


def _primes(count: int) -> list[int]:
    found: list[int] = []
    candidate = 2
    while len(found) < count:
        if all(candidate % prime for prime in found):
            found.append(candidate)
        candidate += 1
    return found


def _cube_root(number: int) -> int:
    low, high = 0, 1 << number.bit_length() // 3 + 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**3 <= number else (low, middle - 1)
    return low


def _root_fractions(count: int, root: Callable[[int], int], power: int, bits: int) -> list[int]:
    """The first bits after the point of the roots of the first primes (FIPS 180-4)."""
    return [root(prime << power * bits) & (1 << bits) - 1 for prime in _primes(count)]


def _halves(words: Iterable[int]) -> list[int]:
    words = list(words)
    return [word & MASK for word in words] + [word >> 32 for word in words]


def _text(*parts: bytes, order: str = "little") -> list[int]:
    return [int.from_bytes(part, order) for part in parts]  # type: ignore[arg-type]


def _keccak() -> list[int]:
    """Halves of the round constants (FIPS 202) but those that any program has."""
    register, constants = 1, []
    for _ in range(24):
        constant = 0
        for place in range(7):
            register = (register << 1 ^ (register >> 7) * 0x71) % 256
            if register & 2:
                constant ^= 1 << (1 << place) - 1
        constants.append(constant)
    plain = {0x8A, 0x88, 0x8009, 0x800A, 0x8081, 0x8082, 0x8089, 0x80000001, 0x80000000}
    plain |= {0, 1, 0x80, 0x8002, 0x8003}
    return [half for half in _halves(constants) if half not in plain]


def _pi(count: int) -> list[int]:
    """Words of pi after the point: BLAKE's constants, Blowfish's first subkeys."""
    bits = 32 * count + 64

    def arctangent_of_inverse(number: int) -> int:
        term = total = (1 << bits) // number
        divisor, sign = 3, -1
        while term:
            term //= number * number
            total += sign * (term // divisor)
            divisor, sign = divisor + 2, -sign
        return total

    pi = 4 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))
    fraction = pi - (3 << bits)
    return [fraction >> bits - 32 * (place + 1) & MASK for place in range(count)]


def _times(left: int, right: int) -> int:
    """A product in the field of AES (FIPS 197)."""
    product = 0
    while right:
        product ^= left if right & 1 else 0
        left = left << 1 ^ (0x11B if left & 0x80 else 0)
        right >>= 1
    return product


def _s_box() -> list[int]:
    """AES's substitution: inverse, then an affine map."""
    box = []
    for byte in range(256):
        inverse = 1
        for _ in range(7):  # the inverse is the 254th power; that of 0 is 0
            inverse = _times(_times(inverse, inverse), byte)
        spread = inverse = _times(inverse, inverse)
        for turn in range(1, 5):
            spread ^= (inverse << turn | inverse >> 8 - turn) & 0xFF
        box.append(spread ^ 0x63)
    return box


def _aes_tables(box: list[int]) -> list[int]:
    """Substitution and column mixing in one word, in its four rotations."""
    words = []
    for byte in box:
        column = [_times(byte, 2), byte, byte, _times(byte, 3)]
        words += [
            int.from_bytes(bytes(column[turn:] + column[:turn]), "little") for turn in range(4)
        ]
    return words


@functools.cache
def families() -> tuple[Family, ...]:
    """All tables; their order is their number."""
    square = [math.isqrt(number << 60) for number in (2, 3, 5, 10, 7)]
    cube = [_cube_root(number << 90) for number in (2, 3, 5, 7)]
    nibbles = [0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0]
    box = _s_box()
    groestl = [
        int.from_bytes(bytes(_times(byte, factor) for factor in (2, 7, 5, 3)), "big")
        for byte in box[:8]
    ]
    skein = (
        0x4903ADFF749C51CE, 0x0D95DE399746DF03, 0x8FD1934127C79BCE, 0x9A255629FF352CB1,
        0x5DB62599DF6CA7B0, 0xEABE394CA9D1C3F4, 0x991112C71A75B523, 0xAE18A40B660FCC33,
    )  # fmt: skip
    tables: tuple[tuple[str, str, Iterable[int]], ...] = (
        ("sha256", "SHA-256", _root_fractions(64, _cube_root, 3, 32)),
        ("iv256", "SHA-256 or BLAKE2s (initial values)", _root_fractions(8, math.isqrt, 2, 32)),
        ("sha512", "SHA-512", _halves(_root_fractions(80, _cube_root, 3, 64))),
        ("iv512", "SHA-512 or BLAKE2b (initial values)",
         _halves(_root_fractions(8, math.isqrt, 2, 64))),
        ("md5", "MD5", [int(abs(math.sin(step + 1)) * 2**32) for step in range(64)]),
        ("sha1rmd", "SHA-1 or RIPEMD-160", [*square, *cube, *nibbles]),
        ("keccak", "Keccak", _keccak()),
        ("pi", "BLAKE or Blowfish", _pi(40)),
        ("aesT", "AES", _aes_tables(box)),
        ("aesS", "AES", [int.from_bytes(bytes(box[at : at + 4]), "little")
                         for at in range(0, 256, 4)]),
        ("salsa", "Salsa20 or ChaCha", _text(b"expa", b"nd 3", b"2-by", b"te k")),
        ("sip", "SipHash", _text(b"some", b"pseu", b"dora", b"ndom", b"lyge", b"nera", b"tedb",
                                 b"ytes", order="big")),
        ("skein", "Skein", [0x1BD11BDA, 0xA9FC1A22, *_halves(skein)]),
        ("fnv", "", [0x01000193, 0x811C9DC5]),
        ("kiss99", "", [36969, 18000, 69069]),
        ("cubehash", "CubeHash", [0x2AEA2A61, 0x50F494D4, 0x2D538B8B, 0x4167D83E, 0x3FEE2313,
                                  0xC701CF8C, 0xCC39968E, 0x50AC5695]),
        ("luffa", "Luffa", [0x303994A6, 0xE0337818, 0xC0E65299, 0x441BA90D, 0x6CC33A12, 0x7F34D442,
                            0xDC56983E, 0x9389217F]),
        ("whirl_groestl", "Grøstl", groestl),
        ("zpow", "Equihash", _text(b"Zcas", b"hPoW")),
        ("sm3", "SM3", [0x79CC4519, 0x7A879D8A, 0x7380166F, 0x4914B2B9]),
        ("lcg64_rx", "", [0x4C957F2D, 0x5851F42D]),
        ("murmur_xx", "", [
            0x85EBCA6B, 0xC2B2AE35, 0xCC9E2D51, 0x1B873593, 0xE6546B64, 0xED558CCD, 0xFF51AFD7,
            0x1A85EC53, 0xC4CEB9FE, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1,
            0x85EBCA87, 0x27D4EB4F, 0x114253D5, 0x2745937F]),
        ("philox", "", [0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xD2B74407, 0xCA5A8263]),
        ("crc32", "", [0xEDB88320, 0x82F63B78, 0x04C11DB7, 0x77073096]),
        ("xorwow_mrg", "", [362437, 0x5851F42D, 4294944443, 4294967087, 0xD9F5B8CF]),
        ("splitmix", "", [0xBF58476D, 0x1CE4E5B9, 0x94D049BB, 0x133111EB, 0x7F4A7C15]),
    )  # fmt: skip
    implied = {
        "sha256": ("iv256",),
        "sha512": ("sha256", "iv512", "iv256"),
        "iv512": ("iv256",),
    }
    # BLAKE-256 has the first 16 words of pi.
    return tuple(
        Family(
            key,
            tuple(sorted(set(words) - {0})),
            algorithm,
            implied.get(key, ()),
            8 if key == "pi" else 0,
        )
        for key, algorithm, words in tables
    )


class Table(Struct, frozen=True):
    """Every (word, family's number) pair in the words' order, and a filter over the words."""

    words: Words
    family: npt.NDArray[np.int64]
    filter: npt.NDArray[np.bool_]


@functools.cache
def table() -> Table:
    """All families' words as one table."""
    pairs = sorted((word, number) for number, one in enumerate(families()) for word in one.words)
    words = np.array([word for word, _ in pairs], np.uint32)
    present = np.zeros(1 << FILTER_BITS, np.bool_)
    present[_folded(words)] = True
    return Table(words, np.array([number for _, number in pairs]), present)


def _folded(words: Words) -> Words:
    return (words ^ words >> np.uint32(32 - FILTER_BITS)) & np.uint32((1 << FILTER_BITS) - 1)


def known_words(words: Words) -> npt.NDArray[np.int64]:
    """Indices of the words that are in any table."""
    whole = table()
    maybe = np.flatnonzero(whole.filter.take(_folded(words)))
    place = np.searchsorted(whole.words, words[maybe]) % len(whole.words)
    found: npt.NDArray[np.int64] = maybe[whole.words[place] == words[maybe]]
    return found


def memberships(words: Words) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For words that are all in the table: index of a word and number of a family, every pair."""
    whole = table()
    first = np.searchsorted(whole.words, words)
    counts = np.searchsorted(whole.words, words, side="right") - first
    index = np.repeat(np.arange(len(words)), counts)
    step = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    family: npt.NDArray[np.int64] = whole.family[first[index] + step]
    return index, family


def named_algorithms(*word_sets: Words) -> tuple[str, ...]:
    """Algorithms of whose table one of the sets of words has enough, as one would name them.

    A kernel's numbers and its module's constants are two such sets. FNV's prime together with all
    of KISS99 is how ProgPoW and its kin compute; either alone is in random number generators.
    """
    named: set[str] = set()
    for words in word_sets:
        named |= _families_in(words)
    named -= {key for one in families() if one.key in named for key in one.implies}
    algorithms = [one.algorithm for one in families() if one.key in named and one.algorithm]
    if "progpow" in named:
        algorithms.append("ProgPoW")
    return tuple(dict.fromkeys(algorithms))


def _families_in(words: Words) -> set[str]:
    present = np.unique(words[known_words(words)])
    _, family = memberships(present)
    found = np.bincount(family, minlength=len(families()))
    shared = _shared_with_generators()
    counted = np.bincount(memberships(present[~np.isin(present, shared)])[1],
                          minlength=len(families()))  # fmt: skip
    keys = set()
    for number, one in enumerate(families()):
        needed = len(one.words) if len(one.words) < FEW else SHARE_TO_NAME * len(one.words)
        needed = one.enough or needed
        if (found if len(one.words) < FEW else counted)[number] >= needed:
            keys.add(one.key)
    if "kiss99" in keys and FNV_PRIME in present:
        keys.add("progpow")
    return keys


@functools.cache
def _shared_with_generators() -> Words:
    """Words of a named table that a random number generator or hash table has too."""
    plain = {word for one in families() if not one.algorithm for word in one.words}
    named = {word for one in families() if one.algorithm for word in one.words}
    return np.array(sorted(plain & named), np.uint32)
