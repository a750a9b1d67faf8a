"""Which part of a target is whose, where several workers are given all of it."""

from __future__ import annotations


class Share:
    """Which of the things that several workers all see are this one's.

    Each thing is the next one's who has least so far; all workers come to the same answer.
    """

    def __init__(self, share: int = 0, shares: int = 1) -> None:
        self._share = share
        self._taken = [0] * shares
        self.is_first = share == 0
        """Whether what is not shared out is told by this worker."""

    def is_mine(self, size: int) -> bool:
        """Whether the next thing, of ``size`` bytes, is this worker's."""
        least = self._taken.index(min(self._taken))
        self._taken[least] += size + 1
        return least == self._share
