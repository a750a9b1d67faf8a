"""What a daemon is put together from before its loop turns: children, opens, denials."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpuwarden.errors import UsageError
from gpuwarden.sensors.nvml.sampler import Sampler
from gpuwarden.watch import cuda_side, cuda_telling, doorman, examiner, judgement
from gpuwarden.watch.denying import Denying
from gpuwarden.watch.identity import Identities, host_mounts
from gpuwarden.watch.judging import Judging
from gpuwarden.watch.open_judge import Surroundings
from gpuwarden.watch.open_watch import OpenWatch
from gpuwarden.watch.sampling import Sampling
from gpuwarden.watch.workers import Worker

if TYPE_CHECKING:
    from gpuwarden.watch.agent import Agent


def start_children(agent: Agent, stack: ExitStack) -> None:
    """Forks the children, from a process without threads; ``stack`` ends them."""
    options = agent.options
    jobs: dict[str, tuple[Callable[[bytes], bytes], float]] = {
        "judge": (agent.judge_job(), judgement.DEADLINE_SECONDS),
        "examiner": (examiner.Examiner(options.root), examiner.DEADLINE_SECONDS),
    }
    if options.enforce:
        jobs["doorman"] = (doorman.Doorman(options.root), doorman.DEADLINE_SECONDS)
    for name, (job, seconds) in jobs.items():
        worker = agent.workers[name] = Worker(name, job, deadline_seconds=seconds)
        worker.start()
        stack.callback(worker.stop)
    agent.judging = Judging(agent.workers["judge"], interval_seconds=options.scan_interval_seconds)
    agent.sampling = Sampling(
        agent.host,
        Sampler(agent.host, library=options.nvml_library),
        agent.node.boot_id,
        agent.policy.thresholds,
        interval_seconds=options.interval_seconds,
    )
    stack.callback(agent.sampling.sampler.close)
    # Its child as well: what is loaded later would be in its memory, too.
    agent.sampling.sampler.request()
    if options.cuda and os.geteuid() == 0:
        agent.cuda = cuda_side.started(agent, stack)


def make_watch(agent: Agent) -> None:
    """Makes the watch of device opens, and has the CUDA side attend it."""
    same_pids = agent.node.host_pid_namespace is not False
    identities = Identities(agent.host, boot_time_ns=agent.node.boot_time_ns, same_pids=same_pids)
    agent.watch = OpenWatch(
        identities=identities,
        surroundings=Surroundings(
            node=agent.node,
            host_mount_namespace=host_mounts(agent.host),
            init=identities.init(),
        ),
        policy=agent.policy,
        policy_path=agent.options.policy_path,
        majors=agent.devices.majors,
        worker=agent.workers["examiner"],
        observe=agent.responses.observing(agent.telling.opens),
        tell=agent.tell_event if agent.options.events else None,
        return_values=agent.options.return_values,
    )
    if agent.cuda is not None:
        agent.cuda.attend(agent.watch, identities)
        agent.cuda.sighted = agent.telling.sighted
        if agent.options.events:
            agent.cuda.tell = cuda_telling.telling(agent, agent.cuda, identities)
    agent.watch.resume(agent.telling.view.findings, time.time_ns())
    agent.devices.attend(agent.watch, agent.judging.changed, agent.process_ended)


def enforce(agent: Agent) -> None:
    """Begins to deny what the policy names. Errors: UsageError where nothing can be denied."""
    probe = agent.choice.probe
    if probe is None or not agent.choice.can_deny:
        raise UsageError(
            f"--enforce: nothing can be denied here: {agent.choice}",
            remedy="root, and a kernel with cgroup and BPF support",
        )
    agent.denying = Denying(
        agent.host,
        agent.policy,
        probe,
        agent.workers["doorman"],
        dry_run=agent.options.dry_run,
        tell=agent.say,
        asked=agent.responses.is_asked_for,
    )
    agent.denying.begin(pin=agent.options.pin)
