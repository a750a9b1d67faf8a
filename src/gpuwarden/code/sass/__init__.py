"""GPU machine code (SASS) of sm_70 to sm_121: decoded without a disassembler, told in numbers."""

from gpuwarden.code.sass.columns import COLUMNS
from gpuwarden.code.sass.features import KernelTable, kernel_features

__all__ = ["COLUMNS", "KernelTable", "kernel_features"]
