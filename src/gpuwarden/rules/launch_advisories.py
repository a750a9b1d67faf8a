"""The constant text of the rules over kernel launches: one id, one text, the steps in order."""

from __future__ import annotations

from gpuwarden.finding import Advisory

_EVIDENCE = (
    "Keep the evidence first: gpuwarden evidence {pid}; what may be done then: gpuwarden respond "
    "{pid}."
)
_RELEARN = (
    "If the workload was changed and this is its own: learn the launch profile again from a run "
    "that is known to be good, with all its phases (gpuwarden trace --learn)."
)

KERNELS_OUTSIDE_PROFILE = Advisory(
    "kernels_outside_profile",
    "A workload launches kernels from modules that its profile does not have",
    "error",
    "The launches of the process are compared with a profile that was learned from a known-good "
    "run. These kernels are from modules that neither that run nor the workload's baselines have: "
    "code that was brought in since. A warning where each of those modules was judged, none "
    "computes like a hash, and none of the kernels comes with a rhythm of its own.",
    (
        _EVIDENCE,
        "Ask {owner} what the kernels named in the evidence are for, and which package brings "
        "them.",
        "Look at the module findings of pid {pid}: where the code came from, and what it computes.",
        _RELEARN,
    ),
)
SECOND_KERNEL_STREAM = Advisory(
    "second_kernel_stream",
    "A second stream of kernels runs beside a workload's own",
    "error",
    "Kernels that the launch profile does not explain come steadily, and out of step with "
    "everything else that the process launches: a second program inside the first, as a miner in "
    "a training process is. A new part of the workload itself comes in step with it. The names "
    "are the process's own word: the profile may have one of the same name.",
    (
        _EVIDENCE,
        "Ask {owner} whether the process serves or trains anything besides: a second model, "
        "a thread that prepares data on the GPU.",
        "Watch it: gpuwarden trace {pid} shows loads and launches as they come.",
        "Look at the peers of pid {pid} (gpuwarden scan): one like a pool's makes it a "
        "cryptominer, and that finding says how to go on.",
        _RELEARN,
    ),
)
LAUNCHES_UNEXPLAINED = Advisory(
    "launches_unexplained",
    "A workload launches more than its profile explains, beside what it always does",
    "warning",
    "For some time a share of the launches has been of kernels that nobody knows by their code, "
    "and that the launch profile has not, or not in this order, while all other launches are as "
    "they were learned. Code that a compiler makes while the job runs, and a changed model, look "
    "the same.",
    (
        "Ask {owner} whether the model, its compiler or its framework was changed.",
        "Look at which modules these kernels are from: gpuwarden trace {pid}, gpuwarden code scan "
        "--pid {pid}.",
        _RELEARN,
    ),
)
