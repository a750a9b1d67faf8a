"""What listens: the metrics endpoint and Falco's receiver, each on a thread of its own."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpuwarden.errors import Unavailable, UsageError
from gpuwarden.watch.judgement import Judged
from gpuwarden.watch.passed_sockets import METRICS, passed_sockets

if TYPE_CHECKING:
    from gpuwarden.outputs.metrics_state import AgentState
    from gpuwarden.watch.agent import Agent
    from gpuwarden.watch.falco_watch import FalcoWatch
    from gpuwarden.watch.state import PartErrors


TOKEN_LIMIT_BYTES = 4096


def falco(agent: Agent, stack: ExitStack) -> FalcoWatch | None:
    """Falco's receiver, if it is asked for. Errors: UsageError."""
    options = agent.options
    if options.falco_listen is None:
        return None
    from gpuwarden.watch.falco_watch import FalcoWatch

    token = None if options.falco_token_file is None else read_token(options.falco_token_file)
    if options.falco_allow_remote and token is None:
        raise UsageError("--falco-allow-remote: anybody could post without a token")
    watch = FalcoWatch(
        agent.host,
        options.falco_listen,
        agent.node.hostname,
        agent.wake,
        entries=agent.watch.book.entries,
        token=token,
        allow_remote=options.falco_allow_remote,
    )
    try:
        watch.start()
    except Unavailable as error:
        raise UsageError(str(error), remedy=error.remedy) from error
    stack.callback(watch.close)
    agent.say(f"Falco's events are taken at http://{watch.address}/")
    return watch


def read_token(path: str) -> str:
    """The one line of a file that only its owner and its group may read.

    Errors: UsageError, also for a file of another user: who can write it knows the token.
    """
    flag = f"--falco-token-file {path}"
    try:
        # Not blocked by a pipe without a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{flag}: cannot be read: {reason}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{flag}: not a file")
        if status.st_uid not in (0, os.geteuid()):
            raise UsageError(f"{flag}: belongs to uid {status.st_uid}", remedy="chown root FILE")
        if status.st_mode & 0o027:
            raise UsageError(
                f"{flag}: others may read or change it (mode {status.st_mode & 0o7777:04o})",
                remedy="chmod 600 FILE",
            )
        data = os.read(descriptor, TOKEN_LIMIT_BYTES + 1)
    finally:
        os.close(descriptor)
    token = data.decode("ascii", "replace").strip()
    if not token or len(data) > TOKEN_LIMIT_BYTES or not (token.isascii() and token.isprintable()):
        raise UsageError(f"{flag}: expected one line of printable ASCII")
    return token


class MetricsSide:
    """The newest state for the endpoint's threads: one frozen value, replaced as a whole."""

    def __init__(self, state: AgentState, errors: PartErrors) -> None:
        self._state = state
        self.errors = errors

    def newest(self) -> AgentState:
        return self._state

    def fill(self, agent: Agent) -> None:
        from gpuwarden.watch.state import agent_state

        self._state = agent_state(agent, self.errors)

    def judged(self, judged: Judged) -> None:
        report = judged.report
        self.errors.judged([(run.name, run.state) for run in report.sensors])
        self.errors.judged([(run.name, run.state) for run in report.sources])


def metrics(agent: Agent, stack: ExitStack) -> MetricsSide | None:
    """The endpoint, if it is asked for or systemd passed a socket for it. Errors: UsageError."""
    passed = passed_sockets().get(METRICS)
    if agent.options.metrics is None and passed is None:
        return None
    from gpuwarden.metrics_server import MetricsServer, parse_address
    from gpuwarden.watch.state import PartErrors, agent_state

    address = parse_address(agent.options.metrics or "127.0.0.1:0")
    errors = PartErrors()
    side = MetricsSide(agent_state(agent, errors), errors)
    server = MetricsServer(address, side.newest, passed=passed)
    try:
        server.start()
    except Unavailable as error:
        raise UsageError(str(error), remedy=error.remedy) from error
    stack.callback(server.stop)
    agent.say(f"metrics at http://{server.address}/metrics")
    return side
