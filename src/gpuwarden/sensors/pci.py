"""PCI addresses in one spelling, so that drivers, sysfs and the kernel log meet on them."""

from __future__ import annotations

from gpuwarden.pattern import pattern

# domain (4 to 8 hexadecimal digits, may be left out):bus:device, and .function or not.
PCI_ADDRESS = pattern(
    r"(?:(?P<domain>[0-9a-fA-F]{4,8}):)?(?P<bus>[0-9a-fA-F]{2}):(?P<device>[0-9a-fA-F]{2})"
    r"(?:\.(?P<function>[0-7]))?"
)


def normalise_pci(text: str) -> str | None:
    """``dddddddd:bb:dd.f`` in lower case, or None when ``text`` is no PCI address."""
    found = PCI_ADDRESS.fullmatch(text.strip())
    # A bus has 32 device numbers.
    if found is None or int(found["device"], 16) > 0x1F:
        return None
    domain = (found["domain"] or "0").rjust(8, "0")
    return f"{domain}:{found['bus']}:{found['device']}.{found['function'] or 0}".lower()
