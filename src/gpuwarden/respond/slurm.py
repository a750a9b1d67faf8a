"""Slurm's steps of a plan."""

from __future__ import annotations

from gpuwarden.respond.slurm_jobs import HoldJobs
from gpuwarden.respond.slurm_node import DrainNode

__all__ = ["DrainNode", "HoldJobs"]
