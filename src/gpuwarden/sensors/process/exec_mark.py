"""The mark of a process's latest exec: what the kernel lays down anew, at random places, each time.

Addresses of the loader, of the first code, of the stack, the arguments and the environment are
drawn anew at each exec and stay as they are until the next one, so their digest tells one exec from
another of the same binary with the same words. Where they are not drawn (``setarch -R``,
``kernel.randomize_va_space=0``) they tell nothing, and there is no mark. A process can move its own
mark (prctl PR_SET_MM); only the kernel's exec count cannot be moved.
"""

from __future__ import annotations

import struct

from gpuwarden.errors import GpuwardenError, Malformed
from gpuwarden.host import Host
from gpuwarden.model import Executable

try:
    from _blake2 import blake2b
except ImportError:  # hashlib has it too, and loads OpenSSL first: 5 ms of each scan
    from hashlib import blake2b

RANDOMISE = "/proc/sys/kernel/randomize_va_space"
ADDR_NO_RANDOMIZE = 0x0040000
"""Of personality(2)."""
AUXV_LIMIT_BYTES = 4096
"""The kernel keeps about 52 pairs of words."""
MARK_BYTES = 16

_STAT_LIMIT_BYTES = 1024
# proc_pid_stat(5), positions after the last ")": startcode, startstack, arg_start, env_start.
_ADDRESSES = (23, 25, 45, 47)
_PERSONALITY_DIGITS = 8
_FOUR = struct.Struct("<4Q")


def parse_addresses(stat: bytes) -> tuple[int, ...]:
    """Where code, stack, arguments and environment begin, of a line of /proc/<pid>/stat.

    Zeros or ones where the kernel hides them from us. Errors: Malformed. Source: proc_pid_stat(5).
    """
    words = stat[stat.rfind(b") ") + 2 :].split()
    if b") " not in stat or len(words) <= _ADDRESSES[-1]:
        raise Malformed("a stat line without addresses")
    found = [words[place] for place in _ADDRESSES]
    if not all(word.isdigit() and len(word) <= 20 for word in found):
        raise Malformed("a stat line whose addresses are no numbers")
    numbers = tuple(int(word) for word in found)
    if max(numbers) >= 1 << 64:
        raise Malformed("a stat line whose addresses are no addresses")
    return numbers


def parse_personality(text: bytes) -> bool:
    """Whether addresses are drawn for this process. Errors: Malformed."""
    word = text.strip()
    if len(word) != _PERSONALITY_DIGITS:
        raise Malformed("a personality that is no number")
    try:
        return not int(word, 16) & ADDR_NO_RANDOMIZE
    except ValueError as error:
        raise Malformed("a personality that is no number") from error


def mark(stat: bytes, auxv: bytes, exe: tuple[str, int] | None) -> str | None:
    """The digest of what an exec laid down, 32 hex digits; None where there is nothing to it.

    ``exe``: device and inode of the binary. Errors: Malformed.
    """
    addresses = parse_addresses(stat)
    # A process that has ended has no memory; what we may not see is 0 or 1.
    if not auxv or min(addresses[1:]) <= 1:
        return None
    digest = blake2b(_FOUR.pack(*addresses), digest_size=MARK_BYTES)
    digest.update(len(auxv).to_bytes(4, "little") + auxv)
    digest.update(repr(exe).encode())
    return digest.hexdigest()


def binary(exe: Executable | None) -> tuple[str, int] | None:
    """Device and inode of a binary, as a mark takes them."""
    if exe is None or exe.device is None or exe.inode is None:
        return None
    return exe.device, exe.inode


def addresses_are_drawn(host: Host) -> bool:
    """Whether the kernel draws addresses at all; False where it does not say."""
    try:
        return host.read_short(RANDOMISE, 16).strip() in (b"1", b"2")
    except GpuwardenError:
        return False


def read_mark(host: Host, pid: int, exe: tuple[str, int] | None, *, drawn: bool) -> str | None:
    """The mark of a process's latest exec. None where addresses tell nothing or cannot be read.

    ``drawn``: what ``addresses_are_drawn`` said. No judgement needs a mark, so that no reason is
    kept; whoever acts asks for another identity then.
    """
    if not drawn:
        return None
    folder = f"/proc/{pid}"
    try:
        if not parse_personality(host.read_short(f"{folder}/personality", 16)):
            return None
        auxv = host.read_short(f"{folder}/auxv", AUXV_LIMIT_BYTES)
        return mark(host.read_short(f"{folder}/stat", _STAT_LIMIT_BYTES), auxv, exe)
    except GpuwardenError:
        return None
