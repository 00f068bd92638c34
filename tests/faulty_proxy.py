"""A proxy before an HTTP server that does to each request what a test tells it."""

import contextlib
import dataclasses
import enum
import html
import re
import socket
import struct
import threading
import time
from collections.abc import Callable

from proxies import Proxy

MOST = 1 << 26


class Do(enum.Enum):
    """What becomes of a request."""

    PASS = "nothing"
    SLOW_DOWN = "503 SlowDown, not passed on"
    BUSY = "500 InternalError, not passed on"
    DENY = "403 AccessDenied, not passed on"
    SKEW = "403 RequestTimeTooSkewed, not passed on"
    EXPIRE = "400 ExpiredToken, not passed on"
    NO_BUCKET = "404 NoSuchBucket, not passed on"
    ECHO = "403 SignatureDoesNotMatch, not passed on, and the request's head as the message"
    FULL = "507 InsufficientStorage, not passed on"
    QUOTA = "403 QuotaExceeded, not passed on"
    RESET_BEFORE = "the connection is reset as soon as the request's head is there"
    RESET_WITHIN = "the connection is reset when half of the body is there; nothing is passed on"
    LOSE_ANSWER = "passed on, and the connection is reset in place of the answer"
    CUT_ANSWER = "passed on, and half of the answer's body comes before the connection ends"
    STALL = "passed on after `stall_s`"


@dataclasses.dataclass(frozen=True)
class Request:
    """What a request asks for, how many came before it, and the access key that signed it."""

    number: int
    method: str
    path: str
    signer: str


REFUSALS = {do: do.value.partition(",")[0].partition(" ")[::2] for do in Do if ", not passed on" in do.value}
CLOCKS = "<RequestTime>20200102T030405Z</RequestTime><ServerTime>2026-07-08T09:10:11Z</ServerTime>"
"""What SKEW says of the two clocks."""

Decide = Callable[[Request], Do]


class FaultyProxy(Proxy):
    """Passes requests on, one after the other, as far as it is told to.

    Attributes:
        decide: called for each request; may be exchanged at any time.
        seen: what was decided, in order.
        stall_s: how long STALL takes.
    """

    def __init__(self, endpoint: str) -> None:
        self.decide: Decide = lambda request: Do.PASS
        self.seen: list[tuple[Request, Do]] = []
        self.stall_s = 1.0
        self._lock = threading.Lock()
        super().__init__(endpoint)

    def counts(self) -> dict[str, int]:
        """How often each fault was done."""
        done = [do.name for _, do in self.seen if do is not Do.PASS]
        return {name: done.count(name) for name in sorted(set(done))}

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), client, client.makefile("rb") as file:
            while head := _head(file):
                self._one(client, file, head)

    def _one(self, client: socket.socket, file, head: bytes) -> None:
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        fields = _fields(head)
        signed = re.search(r"Credential=([^/%]+)", fields.get("authorization", path))
        with self._lock:
            request = Request(len(self.seen), method, path, signed[1] if signed else "")
            do = self.decide(request)
            self.seen.append((request, do))
        if do is Do.RESET_BEFORE:
            _reset(client)
        if fields.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(fields.get("content-length", 0))
        if do is Do.RESET_WITHIN:
            _read(file, length // 2)
            _reset(client)
        body = _read(file, length)
        if do in REFUSALS:
            status, code = REFUSALS[do]
            more = CLOCKS if do is Do.SKEW else ""
            told = html.escape(head.decode("latin-1")) if do is Do.ECHO else "told to"
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{told}</Message>{more}</Error>".encode()
            head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(text)}\r\n\r\n"
            client.sendall(head.encode() + (b"" if method == "HEAD" else text))
            return
        if do is Do.STALL:
            time.sleep(self.stall_s)
        with socket.create_connection(("127.0.0.1", self._port)) as server, server.makefile("rb") as answers:
            server.sendall(head + body)
            answer = _head(answers)
            while answer.split(b" ", 2)[1] == b"100":
                answer = _head(answers)
            content = _content(answers, answer, method)
        if do is Do.LOSE_ANSWER:
            _reset(client)
        if do is Do.CUT_ANSWER and content:
            client.sendall(answer + content[: len(content) // 2])
            _reset(client)
        client.sendall(answer + content)


def _head(file) -> bytes:
    """A message's head, with the empty line; nothing at the end of the connection."""
    lines = []
    while line := file.readline(1 << 16):
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _fields(head: bytes) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in head.decode("latin-1").split("\r\n")[1:] if ":" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}


def _read(file, length: int) -> bytes:
    assert length <= MOST
    data = file.read(length)
    if len(data) < length:
        raise EOFError
    return data


def _content(file, head: bytes, method: str) -> bytes:
    """An answer's body as it comes, chunks and all."""
    fields, status = _fields(head), int(head.split(b" ", 2)[1])
    if method == "HEAD" or status in (204, 304):
        return b""
    if fields.get("transfer-encoding", "").lower() == "chunked":
        parts = []
        while True:
            line = file.readline()
            parts.append(line)
            parts.append(_read(file, int(line, 16) + 2))
            if int(line, 16) == 0:
                return b"".join(parts)
    return _read(file, int(fields.get("content-length", 0)))


def _reset(client: socket.socket) -> None:
    """End a connection with RST, as a server does that dies."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    raise EOFError
