"""Sets of known-good GPU code: one file each, signed, mapped, asked by digest."""

from gpuwarden.code.baseline.known import Baselines, Known, KnownSet
from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.code.baseline.reader import Baseline, open_baseline

__all__ = ["Baseline", "Baselines", "Known", "KnownSet", "Provenance", "open_baseline"]
