"""What an unknown module computes: hash-like integer work or not, and how sure that is."""

from gpuwarden.code.classify.judging import judge, judge_together

__all__ = ["judge", "judge_together"]
