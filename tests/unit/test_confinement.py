"""What a confined child cannot do any more, tried for real, and what it still can."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.confinement import calls, mappings, places, rights
from tests.support.confined import WORKED, Attempts, outcomes

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has these to leave")
LIBC = ctypes.CDLL(None, use_errno=True)
BINARY = os.open("/bin/sh", os.O_RDONLY)
PTRACE_ATTACH = 16


def checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


FORBIDDEN: Attempts = {
    "read a file": lambda: Path("/etc/passwd").read_bytes(),
    "write a file": lambda: Path("/tmp/gpuwarden-test-written").write_bytes(b"x"),
    "look at a file": lambda: os.stat("/etc/passwd"),
    "list a folder": lambda: os.listdir("/"),
    "remove a file": lambda: os.unlink("/tmp/gpuwarden-test-not-there"),
    "leave the folder": lambda: os.chdir("/etc"),
    "make a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "make a local socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "run a program": lambda: os.execv("/bin/true", ["true"]),
    "run an open file": lambda: os.execve(BINARY, ["sh", "-c", "exit 0"], {}),
    "make a process": os.fork,
    "signal": lambda: os.kill(os.getppid(), 0),
    "trace": lambda: checked(LIBC.ptrace(PTRACE_ATTACH, os.getppid(), None, None)),
    "mount": lambda: checked(LIBC.mount(b"none", b"/mnt", b"tmpfs", 0, None)),
    "read its parent's memory": lambda: checked(
        LIBC.process_vm_readv(os.getppid(), None, 0, None, 0, 0)
    ),
    "make a memory file": lambda: os.memfd_create("x"),
    "map executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_EXEC | mmap.PROT_READ),
    "choose who is signalled": lambda: __import__("fcntl").fcntl(BINARY, 8, os.getppid()),
    "raise its limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)),
}


def a_thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


ALLOWED: Attempts = {
    "read what is open": lambda: os.pread(BINARY, 4, 0),
    "map what is open": lambda: mmap.mmap(BINARY, 4096, prot=mmap.PROT_READ)[:4],
    "take memory": lambda: bytes(64 << 20),
    "start a thread": a_thread,
    "tell the time": time.time,
    "wait": lambda: time.sleep(0.001),
    "take random bytes": lambda: os.urandom(8),
}


def test_a_parser_s_calls_are_all_that_is_left() -> None:
    told = outcomes([calls.refuse_calls], {**FORBIDDEN, **ALLOWED})
    assert {name: told[name] for name in ALLOWED} == dict.fromkeys(ALLOWED, WORKED)
    assert [name for name in FORBIDDEN if told[name] == WORKED] == []


PATHS = ("read a file", "write a file", "list a folder", "run a program")


def test_landlock_alone_keeps_every_path_out_of_reach() -> None:
    told = outcomes([places.leave_paths], {name: FORBIDDEN[name] for name in PATHS})
    assert told == dict.fromkeys(PATHS, "PermissionError")


@is_root
def test_an_empty_root_alone_has_no_path_and_cannot_be_written_to() -> None:
    told = outcomes(
        [places.leave_root],
        {
            "read a file": FORBIDDEN["read a file"],
            "write a file": lambda: Path("/written").write_bytes(b"x"),
            "look around": lambda: [].index(os.listdir("/")),  # type: ignore[arg-type]
        },
    )
    assert told["read a file"] == "FileNotFoundError"
    assert told["write a file"] == "OSError"
    # An empty list is in no empty list: it was listed, and nothing is there.
    assert told["look around"] == "ValueError"


@is_root
def test_the_other_network_has_nobody_in_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def connect() -> None:
            with socket.socket() as client:
                client.settimeout(5)
                client.connect(address)

        assert outcomes([], {"connect": connect})["connect"] == WORKED
        assert outcomes([places.leave_network], {"connect": connect})["connect"] == "OSError"


@is_root
def test_what_is_left_of_the_machine_is_left_to_nobody_else() -> None:
    before = (os.getcwd(), sorted(os.listdir("/proc/self/ns")), os.listdir("/"))
    outcomes([places.leave_network, places.leave_root], {})
    assert (os.getcwd(), sorted(os.listdir("/proc/self/ns")), os.listdir("/")) == before


@is_root
def test_rights_are_gone() -> None:
    def drop() -> None:
        rights.drop_rights(nobody=True)

    told = outcomes(
        [drop],
        {
            "change the owner": lambda: os.chown("/tmp", 0, 0),
            "become root": lambda: os.setuid(0),
            "read a secret": lambda: Path("/etc/shadow").read_bytes(),
        },
    )
    assert told == dict.fromkeys(told, "PermissionError")


def test_limits_are_never_raised() -> None:
    def lower() -> None:
        rights.limit({resource.RLIMIT_NOFILE: 32})
        rights.limit({resource.RLIMIT_NOFILE: 64, resource.RLIMIT_FSIZE: 0})

    def is_lower() -> None:
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (32, 32)

    assert outcomes([lower], {"see": is_lower})["see"] == WORKED


def test_only_what_is_given_stays_open() -> None:
    reader, writer = os.pipe()
    answer, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            binary, tell = rights.keep_descriptors([BINARY, told])
            try:
                os.fstat(reader)
                state = "open"
            except OSError:
                state = "closed"
            os.write(1, b"nowhere")
            os.write(tell, f"{os.pread(binary, 4, 0).hex()} {state}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(answer, 100).decode().split() == ["7f454c46", "closed"]
    for descriptor in (reader, writer, answer, told):
        os.close(descriptor)


# ------------------------------------------------------------------------------ the filter itself

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def verdict(machine: str, number: int, arch: int | None = None, *arguments: int) -> int:
    """What the filter answers, by a plain interpreter of the few instructions that it uses."""
    given = [*arguments, *(0,) * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, calls.AUDIT[machine] if arch is None else arch, 0, *given)
    code = list(struct.iter_unpack("=HBBI", calls.program(machine)))
    at, held = 0, 0
    while True:
        what, yes, no, constant = code[at]
        at += 1
        if what == 0x20:
            held = struct.unpack_from("<I", data, constant)[0]
        elif what == 0x06:
            return int(constant)
        else:
            holds = {0x15: held == constant, 0x25: held > constant, 0x45: bool(held & constant)}
            at += yes if holds[what] else no


@pytest.mark.parametrize("machine", calls.MACHINES)
def test_the_filter_lets_through_what_is_listed(machine: str) -> None:
    which = calls.MACHINES.index(machine)
    for pair in calls.ALLOWED.values():
        number = pair[which]
        assert number is None or verdict(machine, number) == ALLOW
    clone, mapping = calls.CLONE[which], calls.MAPPING["mmap"][which]
    assert verdict(machine, clone, None, calls.CLONE_THREAD | 0x3D0F00) == ALLOW
    assert verdict(machine, clone, None, signal.SIGCHLD) == EPERM
    assert verdict(machine, calls.CLONE3[which]) == ENOSYS
    assert verdict(machine, mapping, None, 0, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == ALLOW
    assert verdict(machine, mapping, None, 0, 4096, mmap.PROT_READ | mmap.PROT_EXEC) == EPERM
    fcntl = calls.FCNTL[which]
    assert [verdict(machine, fcntl, None, 3, what) for what in (0, 4, 1030)] == [ALLOW] * 3
    assert [verdict(machine, fcntl, None, 3, what) for what in (5, 8, 10, 1029)] == [EPERM] * 4


@pytest.mark.parametrize("machine", calls.MACHINES)
@given(number=st.integers(0, 2**32 - 1), arguments=st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_the_filter_refuses_what_is_not_listed(
    machine: str, number: int, arguments: list[int]
) -> None:
    which = calls.MACHINES.index(machine)
    listed = {pair[which] for pair in [*calls.ALLOWED.values(), *calls.MAPPING.values()]}
    listed |= {calls.CLONE[which], calls.CLONE3[which], calls.FCNTL[which]}
    if number not in listed:
        assert verdict(machine, number, None, *arguments) == EPERM


@pytest.mark.parametrize("machine", calls.MACHINES)
@given(arch=st.integers(0, 2**32 - 1), number=st.integers(0, 500))
def test_another_architecture_s_calls_end_the_process(machine: str, arch: int, number: int) -> None:
    if arch != calls.AUDIT[machine]:
        assert verdict(machine, number, arch) == KILL


# ------------------------------------------------------------------------------ mappings

# linux/bpf.h: BPF_MAP_CREATE, BPF_MAP_TYPE_ARRAY, BPF_F_MMAPABLE; the head of union bpf_attr: type,
# key size, value size, entries, flags.
BPF_CALL = {"x86_64": 321, "aarch64": 280}
MAP_CREATE, ARRAY, MMAPABLE = 0, 2, 1 << 10
MAP_ATTRIBUTES = struct.Struct("=5I28x")


@is_root
def test_memory_that_a_parent_shares_with_the_kernel_is_no_longer_the_child_s() -> None:
    attributes = MAP_ATTRIBUTES.pack(ARRAY, 4, mmap.PAGESIZE, 1, MMAPABLE)
    number = BPF_CALL[os.uname().machine]
    descriptor = LIBC.syscall(number, MAP_CREATE, attributes, len(attributes))
    if descriptor < 0:
        pytest.skip(f"no BPF maps here: {os.strerror(ctypes.get_errno())}")
    shared = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    shared[0] = 7
    ours = mmap.mmap(-1, mmap.PAGESIZE)

    def of_the_kernel() -> list[tuple[int, int]]:
        return list(mappings.kernel_mappings(Path("/proc/self/maps").read_bytes()))

    attempts = {
        "find it": lambda: of_the_kernel()[0],
        "write to its own": lambda: ours.__setitem__(0, 1),
    }
    assert outcomes([], attempts) == dict.fromkeys(attempts, WORKED)
    assert outcomes([mappings.leave_kernel_mappings], attempts) == {
        "find it": "IndexError",
        "write to its own": WORKED,
    }
    assert (shared[0], ours[0]) == (7, 1)
    shared.close()


@given(maps=st.binary(max_size=300))
def test_any_map_of_memory_is_read(maps: bytes) -> None:
    assert all(start >= 0 and end >= 0 for start, end in mappings.kernel_mappings(maps))
