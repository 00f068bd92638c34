"""Proxies before a server of this machine, and one that counts what the server is asked."""

import abc
import contextlib
import re
import socket
import threading
from typing import Self

_REQUEST = re.compile(rb"(?:^|\r\n\r\n)(GET|HEAD) (\S+) HTTP/1\.1\r\n")


class Proxy(abc.ABC):
    """Listens on a port of its own, and serves each connection in a thread.

    Args:
        endpoint: of the server, `http://host:port` of this machine.

    Attributes:
        endpoint: URL of the proxy.
    """

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    @abc.abstractmethod
    def _serve(self, client: socket.socket) -> None:
        """Serve a client's connection to its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class CountingProxy(Proxy):
    """Passes connections on, and notes the requests without a body that go through.

    Attributes:
        requests: (method, path) of each.
    """

    def __init__(self, endpoint: str) -> None:
        self.requests: list[tuple[str, str]] = []
        super().__init__(endpoint)

    def shards(self) -> list[str]:
        """Paths of the GETs of shards, since the last call."""
        found = [path for method, path in self.requests if method == "GET" and "/shards/" in path]
        self.requests.clear()
        return found

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(target=self._pass, args=(server, client), daemon=True).start()
        self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        pending = b""
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                pending += data
                # A request ends with an empty line; what follows is the next one's.
                whole, last, pending = pending.rpartition(b"\r\n\r\n")
                for method, path in _REQUEST.findall(whole + last):
                    self.requests.append((method.decode(), path.decode()))
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _pass(self, server: socket.socket, client: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        with contextlib.suppress(OSError):
            while count := server.recv_into(buffer):
                client.sendall(memoryview(buffer)[:count])
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
