"""A server that speaks as much of S3 as an upload takes, and keeps nothing of what it gets.

    python benchmarks/null_s3.py [--tls FILE]

FILE is a certificate and its key. Prints its port, and serves until its input ends. Bodies are counted and dropped;
those for the bucket `hashed` are hashed first. `GET /-/report` tells, as JSON, of the time since the last one:
`requests`, the most under way at once, and `objects`, for each path `[[bytes, SHA-256 or null], ...]` of its parts in
order. Nothing else can be read; signatures are not looked at.
"""

import argparse
import contextlib
import hashlib
import json
import socket
import ssl
import sys
import threading
from collections import defaultdict
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

Part = tuple[int, Any]
"""Bytes of a body, and what was made of them."""

_BLOCK = 4 << 20


class Body(Protocol):
    """What takes a body that is not dropped unseen."""

    def update(self, block: memoryview | bytes) -> object:
        """The next bytes; `block` is the caller's again afterwards. Blocks end at multiples of 4 MiB of the body."""

    def hexdigest(self) -> Any:
        """What is made of them."""


class NullS3:
    """What the connections share.

    Args:
        tls: how connections are encrypted, if they are.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._objects: dict[str, list[Part]] = {}
        self._uploads: dict[str, dict[int, Part]] = defaultdict(dict)
        self._started = self._underway = self._most = 0

    def serve(self, connection: socket.socket) -> None:
        """Answer one client until it goes."""
        with contextlib.suppress(OSError), connection:
            if self._tls is None:
                self._converse(connection, plain=True)
            else:
                with self._tls.wrap_socket(connection, server_side=True) as client:
                    self._converse(client, plain=False)

    def _converse(self, client: socket.socket, plain: bool) -> None:
        block, data = memoryview(bytearray(_BLOCK)), b""
        while True:
            while b"\r\n\r\n" not in data:
                more = client.recv(1 << 16)
                if not more:
                    return
                data += more
            head, _, data = data.partition(b"\r\n\r\n")
            line, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = line.split(" ", 2)
            fields = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
            with self._lock:
                self._underway += 1
                self._most = max(self._most, self._underway)
            if "100-continue" in fields.get("expect", "").lower():
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = int(fields.get("content-length", 0))
            early, data = data[:length], data[length:]
            taker = self._body(method, target)
            if taker is not None:
                taker.update(early)
            left = length - len(early)
            # TCP drops what it is told to truncate, so that this process need not copy it.
            flags = (socket.MSG_WAITALL | socket.MSG_TRUNC if taker is None else socket.MSG_WAITALL) if plain else 0
            while left:
                count = client.recv_into(block, min(left, _BLOCK - (length - left) % _BLOCK), flags)
                if not count:
                    return
                if taker is not None:
                    taker.update(block[:count])
                left -= count
            made = None if taker is None else taker.hexdigest()
            with self._lock:
                self._underway -= 1
                status, body, extra = self._answer(method, target, fields, (length, made))
            size = extra.pop("Content-Length", str(len(body)))
            extra = {"ETag": '"0"', "Last-Modified": "Thu, 01 Jan 1970 00:00:00 GMT", "Content-Length": size} | extra
            answer = f"HTTP/1.1 {status} x\r\n" + "".join(f"{name}: {value}\r\n" for name, value in extra.items())
            client.sendall(answer.encode() + b"\r\n" + body)

    def _body(self, method: str, target: str) -> Body | None:
        """What takes a request's body; None drops it."""
        return hashlib.sha256() if target.startswith("/hashed/") else None

    def _answer(
        self, method: str, target: str, fields: dict[str, str], part: Part
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and header fields. The caller holds the lock."""
        url = urlsplit(target)
        query, path = parse_qs(url.query, keep_blank_values=True), url.path
        upload, taken = query.get("uploadId", [""])[0], path in self._objects
        if path == "/-/report":
            report = {"requests": self._most, "objects": self._objects}
            self._most, self._objects = 0, {}
            return 200, json.dumps(report).encode(), {}
        if method == "HEAD":
            size = sum(count for count, _ in self._objects.get(path, []))
            return (200, b"", {"Content-Length": str(size)}) if taken else (404, b"", {})
        if method == "DELETE":
            self._uploads.pop(upload, None)
            if not upload:
                self._objects.pop(path, None)
            return 204, b"", {}
        if method == "PUT" and upload:
            self._uploads[upload][int(query["partNumber"][0])] = part
            return 200, b"", {}
        if method == "POST" and "uploads" in query:
            self._started += 1
            return 200, _xml("InitiateMultipartUploadResult", UploadId=f"upload{self._started}"), {}
        if method not in ("PUT", "POST"):
            return 501, _xml("Error", Code="NotImplemented"), {}
        if taken and fields.get("if-none-match") == "*":
            return 412, _xml("Error", Code="PreconditionFailed"), {}
        if method == "PUT":
            self._objects[path] = [part]
            return 200, b"", {}
        self._objects[path] = [found for _, found in sorted(self._uploads.pop(upload).items())]
        return 200, _xml("CompleteMultipartUploadResult", ETag='"0"'), {}


def _xml(name: str, **values: str) -> bytes:
    inner = "".join(f"<{key}>{value}</{key}>" for key, value in values.items())
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'.encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tls", metavar="FILE", help="certificate and key")
    args = parser.parse_args()
    tls = None
    if args.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(args.tls)
    server = NullS3(tls)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
