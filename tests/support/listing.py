"""What nvdisasm says of a cubin, instruction by instruction."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.nvcc import CUDA

# The address, an optional predicate, mnemonic and operands, and the first word in a comment.
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);?\s*"
    r"/\* 0x([0-9a-f]{16}) \*/"
)
SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
LABEL = re.compile(r"^(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass
class Listed:
    """One instruction; ``operands`` are as printed."""

    opcode: int
    name: str
    operands: tuple[str, ...]

    @property
    def mnemonic(self) -> str:
        return self.name.split(".")[0]

    @property
    def table(self) -> int | None:
        """The truth table of a LOP3: the last operand but a predicate."""
        if self.mnemonic not in ("LOP3", "ULOP3"):
            return None
        return int(next(one for one in reversed(self.operands) if one.startswith("0x")), 16)

    @property
    def rotates(self) -> bool:
        """A funnel shift of one register with itself."""
        if self.mnemonic not in ("SHF", "USHF"):
            return False
        left, right = self.operands[1].split(".")[0], self.operands[3].split(".")[0]
        return left == right not in ("RZ", "URZ")

    @property
    def moves(self) -> bool:
        """A multiply-add with a factor of zero, or an addition to it on sm_120 (0x35)."""
        adds = self.mnemonic == "IADD" and self.opcode & 0x1FF == 0x35
        return (adds or self.mnemonic in ("IMAD", "HFMA2")) and "RZ" in self.operands[1]

    @property
    def factor(self) -> int | None:
        """The number that an IMAD multiplies by, where it is one."""
        if self.mnemonic != "IMAD" or not self.operands[2].startswith("0x"):
            return None
        return int(self.operands[2], 16)


@dataclass
class ListedKernel:
    code: list[Listed] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def loops(self) -> Iterator[tuple[int, int]]:
        """Target and place of each BRA back by two instructions or more."""
        for place, one in enumerate(self.code):
            target = TARGET.search(" ".join(one.operands)) if one.mnemonic == "BRA" else None
            if target and self.labels[target[1]] <= place - 2:
                yield self.labels[target[1]], place


def listed(cubin: Path) -> dict[str, ListedKernel]:
    """Each kernel's instructions, padding in."""
    done = subprocess.run(
        [CUDA / "bin/nvdisasm", "-c", "-hex", cubin], capture_output=True, text=True, check=True
    )
    kernels: dict[str, ListedKernel] = {}
    kernel = ListedKernel()
    for line in done.stdout.splitlines():
        if section := SECTION.match(line):
            kernel = kernels[section[1]] = ListedKernel()
        elif label := LABEL.match(line):
            kernel.labels[label[1]] = len(kernel.code)
        elif one := INSTRUCTION.match(line):
            assert int(one[1], 16) == 16 * len(kernel.code), line
            operands = tuple(part.strip() for part in one[3].split(","))
            kernel.code.append(Listed(int(one[4], 16) & 0xFFF, one[2], operands))
    return kernels
