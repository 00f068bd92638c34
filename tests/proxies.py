"""A proxy before a server that counts what it is asked."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

_REQUEST = re.compile(rb"(?:^|\r\n\r\n)(GET|HEAD) (\S+) HTTP/1\.1\r\n")


class CountingProxy:
    """Passes connections on to a port of this machine, and notes the requests without a body that go through.

    Attributes:
        requests: (method, path) of each.
        endpoint: URL of the proxy.
    """

    def __init__(self, port: int) -> None:
        self.requests: list[tuple[str, str]] = []
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def shards(self) -> list[str]:
        """Paths of the GETs of shards, since the last call."""
        found = [path for method, path in self.requests if method == "GET" and "/shards/" in path]
        self.requests.clear()
        return found

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
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client), daemon=True).start()

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


@contextlib.contextmanager
def counting(endpoint: str) -> Iterator[CountingProxy]:
    """A proxy before `http://host:port` of this machine."""
    proxy = CountingProxy(int(endpoint.rpartition(":")[2]))
    try:
        yield proxy
    finally:
        proxy.close()
