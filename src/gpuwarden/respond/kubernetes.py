"""Kubernetes' steps of a plan."""

from __future__ import annotations

from gpuwarden.respond.kubernetes_node import Cordon
from gpuwarden.respond.kubernetes_pod import DeletePod

__all__ = ["Cordon", "DeletePod"]
