"""Which JIT cache a file is in, as far as its path tells: a claim, like everything a path says."""

from __future__ import annotations

from collections.abc import Container

from gpuwarden.code.module import Place
from gpuwarden.pattern import pattern

# Where each puts its files unless its variable says otherwise: CUDA_CACHE_PATH, TRITON_CACHE_DIR,
# TORCHINDUCTOR_CACHE_DIR, CUPY_CACHE_DIR, NUMBA_CACHE_DIR, XLA's autotuning and kernel caches.
_CACHES = (
    ("CUDA driver", pattern(r"(?:^|/)(?:\.nv/)?ComputeCache/")),
    ("torch.compile", pattern(r"(?:^|/)torchinductor_[^/]+/|/inductor/|(?:^|/)fxgraph/")),
    ("Triton", pattern(r"(?:^|/)\.triton/(?:cache|dump)/")),
    ("CuPy", pattern(r"(?:^|/)\.cupy/kernel_cache/")),
    ("torch extensions", pattern(r"(?:^|/)torch_extensions/")),
    ("FlashInfer", pattern(r"(?:^|/)\.cache/flashinfer/")),
    ("DeepGEMM", pattern(r"(?:^|/)\.deep_gemm/")),
)


def cache_of(place: Place) -> str:
    """``Triton``, ``CUDA driver``, ``torch.compile``…; empty when the path names none."""
    path = "/".join((place.target, *place.members))
    return next((name for name, shape in _CACHES if shape.search(path)), "")


def cache_by_neighbours(name: str, names: Container[str]) -> str:
    """The cache that files of the same stem tell of, wherever it is: Triton keeps its own
    representations beside what ptxas made of them."""
    stem, dot, _ = name.rpartition(".")
    beside = (f"{stem}.ttir", f"{stem}.ttgir", f"__grp__{stem}.json")
    return "Triton" if dot and any(other in names for other in beside) else ""
