"""Asks the runtimes for containers by id, in a child of its own: nothing is before a denial."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpuwarden.enforcement import Located
from gpuwarden.model import Container, Fact
from gpuwarden.sensors import containers
from gpuwarden.watch.host_job import HostJob

DEADLINE_SECONDS = 10.0


class LookUp(Fact, frozen=True, kw_only=True):
    """One container to ask for, as its group names it."""

    container_id: str
    runtime: str | None = None
    pod_uid: str | None = None
    user_uid: int | None = None


class LookUps(Fact, frozen=True, kw_only=True):
    wanted: tuple[LookUp, ...]


class Found(Fact, frozen=True, kw_only=True):
    """The containers that a runtime knows; the others were not told."""

    containers: tuple[Container, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_question = msgspec.msgpack.Decoder(LookUps)
_answer = msgspec.msgpack.Decoder(Found)
NOBODY = _encoder.encode(Found())
"""The answer of somebody who knows none of them."""


def encode(wanted: Iterable[Located]) -> bytes:
    """The question for containers as their groups name them."""
    asked = (
        LookUp(
            container_id=one.container_id,
            runtime=one.runtime,
            pod_uid=one.pod_uid,
            user_uid=one.user_uid,
        )
        for one in wanted
    )
    return _encoder.encode(LookUps(wanted=tuple(asked)))


def decode(body: bytes) -> tuple[Container, ...]:
    return _answer.decode(body).containers


class Doorman(HostJob):
    """The job of the child: asks the runtimes for containers by id."""

    def __call__(self, body: bytes) -> bytes:
        found = []
        for one in _question.decode(body).wanted:
            told = containers.look_up(
                self.host, one.container_id, one.runtime, one.pod_uid, user_uid=one.user_uid
            )
            if isinstance(told, Container):
                found.append(told)
        return _encoder.encode(Found(containers=tuple(found)))
