"""The steps in the order of a plan, what each needs of the verdict, and what undoes which."""

from __future__ import annotations

from typing import Final

from gpuwarden.respond.allowed import Power
from gpuwarden.respond.step_names import StepName

NEEDS: Final[dict[StepName, Power]] = {
    "evidence": "evidence",
    "freeze": "freeze",
    # Undoing gives back what was taken: no verdict stands in its way.
    "thaw": "evidence",
    "deny": "deny",
    "allow": "evidence",
    # Neither ends anything that runs; both keep more from starting.
    "hold-jobs": "deny",
    "cordon": "deny",
    "kill": "kill",
    "delete-pod": "kill",
    "drain-node": "deny",
}
"""Step → the power that a verdict must give; the steps stand in the order of a plan."""

STEPS: Final[tuple[StepName, ...]] = tuple(NEEDS)
UNDOING: Final[frozenset[StepName]] = frozenset({"thaw", "allow"})
WITHOUT_EVIDENCE: Final[frozenset[StepName]] = UNDOING | {"evidence"}
"""Steps that need no archive of the process first."""
ENDING: Final[frozenset[StepName]] = frozenset({"kill", "delete-pod"})
"""Steps after which is looked whether it came back."""
