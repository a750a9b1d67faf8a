"""NVIDIA's LTO-IR: its container by magic, and what tells of it in a fatbin.

What nvcc puts into a fatbin is obfuscated with a key of its own: only its stored bytes can be
compared. A bare container (``nvcc -ltoir``, ``nvrtcGetLTOIR``) does not say where it ends, so it is
told only where it begins a buffer.
"""

from __future__ import annotations

MAGIC = b"\xed\x43\x4e\x7f"
"""0x7F4E43ED, little-endian."""
