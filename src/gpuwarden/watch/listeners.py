"""What listens: the metrics endpoint and Falco's receiver, each on a thread of its own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpuwarden.watch.judgement import Judged

if TYPE_CHECKING:
    from gpuwarden.outputs.metrics_state import AgentState
    from gpuwarden.watch.agent import Agent
    from gpuwarden.watch.falco_watch import FalcoWatch
    from gpuwarden.watch.state import PartErrors


def falco(agent: Agent, stack: ExitStack) -> FalcoWatch | None:
    """Falco's receiver, if it is asked for. Errors: UsageError, Unavailable."""
    if agent.options.falco_listen is None:
        return None
    from gpuwarden.watch.falco_watch import FalcoWatch

    watch = FalcoWatch(agent.host, agent.options.falco_listen, agent.node.hostname, agent.wake)
    watch.start()
    stack.callback(watch.close)
    return watch


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
    """The endpoint, if it is asked for. Errors: UsageError, Unavailable."""
    if agent.options.metrics is None:
        return None
    from gpuwarden.metrics_server import MetricsServer, parse_address
    from gpuwarden.watch.state import PartErrors, agent_state

    address = parse_address(agent.options.metrics)
    errors = PartErrors()
    side = MetricsSide(agent_state(agent, errors), errors)
    server = MetricsServer(address, side.newest)
    server.start()
    stack.callback(server.stop)
    agent.say(f"metrics at http://{server.address}/metrics")
    return side
