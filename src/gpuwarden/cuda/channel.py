"""Messages both ways over a socket that neither end ever waits for."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Generic, TypeVar

import msgspec

from gpuwarden.errors import Malformed

LENGTH = struct.Struct("=I")
"""Before each message."""
MESSAGE_LIMIT_BYTES = 16 << 20
UNSENT_LIMIT_BYTES = 32 << 20
"""Of messages that the other end has not taken; what comes after them is dropped and counted."""
RECEIVE_BYTES = 1 << 18
RECEIVES = 32
"""At one time, so that a flood does not keep ``receive`` from returning."""

In = TypeVar("In")


class Channel(Generic[In]):
    """One end of a socket pair: sends any Struct, receives the kinds that it is made for."""

    def __init__(self, end: socket.socket, kinds: object) -> None:
        end.setblocking(False)
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(kinds)
        self._received = bytearray()
        self._unsent = bytearray()
        self.dropped = 0
        """Messages that the other end did not take in time."""
        self.closed = False
        """The other end is gone."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent) and not self.closed

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message, or keeps it until ``flush`` can."""
        body = self._encoder.encode(message)
        if len(body) > MESSAGE_LIMIT_BYTES or len(self._unsent) > UNSENT_LIMIT_BYTES:
            self.dropped += 1
            return
        self._unsent += LENGTH.pack(len(body))
        self._unsent += body
        self.flush()

    def flush(self) -> None:
        """Sends what the other end has room for."""
        while self._unsent and not self.closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._unsent[:sent]

    def receive(self) -> list[In]:
        """What has come. Errors: Malformed when the other end says what is no message."""
        for _ in range(RECEIVES):
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self._received += data
        found: list[In] = []
        at = 0
        while len(self._received) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received, at)
            if length > MESSAGE_LIMIT_BYTES:
                raise Malformed(
                    f"a message of {length} bytes, and {MESSAGE_LIMIT_BYTES} are the bound"
                )
            if len(self._received) - at - LENGTH.size < length:
                break
            begin = at + LENGTH.size
            try:
                found.append(
                    self._decoder.decode(memoryview(self._received)[begin : begin + length])
                )
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Malformed(f"a message that is none: {error}") from error
            at = begin + length
        del self._received[:at]
        return found

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()
