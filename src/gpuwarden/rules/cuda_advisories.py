"""The constant text of the rules over the CUDA layer: one id, one text, the steps in order."""

from __future__ import annotations

from gpuwarden.finding import Advisory

_EVIDENCE = (
    "Keep the evidence first, before the image is freed: gpuwarden evidence {pid}; what may be "
    "done then: gpuwarden respond {pid}."
)

MODULE_LOADED_HASH_LIKE = Advisory(
    "module_loaded_hash_like",
    "Unknown code that computes like a hash function was loaded onto {gpu}",
    "critical",
    "The process gave the driver a module that nobody knows, and what its instructions compute is "
    "like hashing: a miner, a password cracker, or a library that hashes or encrypts. In a "
    "workload that declares the code it may load, this is a miner inside a legitimate workload "
    "until somebody explains it; elsewhere it is an error. That the code looks as if a JIT "
    "compiler had made it clears nothing.",
    (
        _EVIDENCE,
        "Call {owner} and ask what the kernels named in the evidence are for, and which package "
        "brings them; the workload may be the victim.",
        "Look where it came from: what the process imported, downloaded or unpacked shortly before "
        "the load, and which image and user started it.",
        "Look at the peers of pid {pid} (gpuwarden scan): one like a pool's makes it a "
        "cryptominer, and that finding says how to go on.",
        "If it is theirs: add the package that brings it to the profile's baseline, by its "
        "digests; never allow a whole JIT class for it.",
        "If nobody knows it: let {owner} or the scheduler take the job off the node, after the "
        "evidence is kept.",
    ),
)
MODULE_LOADED_UNKNOWN = Advisory(
    "module_loaded_unknown",
    "GPU code was loaded onto {gpu} that its workload's profile does not know",
    "warning",
    "The workload declares which GPU code it may load, and these modules are in none of its "
    "baselines and of no JIT class that it allows. Code that was compiled while the job runs, and "
    "an updated framework, look the same.",
    (
        "Ask {owner} whether the workload was updated or compiles kernels of its own.",
        "Compare with a known-good run: gpuwarden baseline learn, then gpuwarden code verify.",
        "If it is theirs: gpuwarden baseline build from the package or image that brings it, or "
        "name its JIT class in the profile.",
        "If it is not: treat the process as one with an unknown plug-in, and look at what "
        "started it.",
    ),
)
CONTEXTS_BEYOND_DECLARED = Advisory(
    "contexts_beyond_declared",
    "A process has more CUDA contexts on one device than its workload declares",
    "warning",
    "Frameworks work in one context on each device, the primary one. A second one in the same "
    "process is a second tenant: a plug-in, a profiler, or code that hides among the job's own.",
    (
        "Ask {owner} what the further context is for; inference servers and some video libraries "
        "make their own.",
        "Look at what was loaded since it was made: the module findings of pid {pid}, and "
        "gpuwarden trace {pid} for what comes.",
        "If it belongs there: contexts: N at the workload in the policy.",
    ),
)
SECOND_GPU_PROCESS_IN_CONTAINER = Advisory(
    "second_gpu_process_in_container",
    "A second process uses the GPU in a container that is declared to have one",
    "warning",
    "The policy says that one process of each such container uses the GPU (single_process). "
    "Another one has a CUDA context, loads code or launches kernels there.",
    (
        "Ask {owner} whether the workload was changed: a launcher with several ranks, or a "
        "debugging session.",
        "Look at what the second process is and who started it: its binary, its parents, and the "
        "time it came.",
        "If it belongs there: take single_process off the workload in the policy.",
    ),
)
GPU_PROCESS_WITHOUT_DRIVER_LIBRARY = Advisory(
    "gpu_process_without_driver_library",
    "A process holds {gpu} and has no CUDA driver library that is known",
    "error",
    "A program that computes on an NVIDIA GPU has the driver's library mapped. One that holds the "
    "devices without it talks to the kernel driver by itself, or carries a copy that is linked in "
    "or altered: its contexts, modules and launches cannot be seen. Tools that only ask the "
    "driver, display servers and runtimes are not meant. A warning where the process could not be "
    "read whole.",
    (
        "Keep the evidence first: gpuwarden evidence {pid}.",
        "Ask {owner} what program it is; a few research runtimes drive the GPU without CUDA.",
        "Look for the driver inside its binary: strings on the copy, for cuInit and for the "
        "driver's version.",
        "gpuwarden code scan --pid {pid} looks for GPU code in its memory all the same.",
        "If it may stay: an exception of the policy, by its image digest or binary.",
    ),
)
