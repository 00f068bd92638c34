"""A server that speaks as much of S3 as a run takes, in several processes, and forgets the shards that it gets.

    python benchmarks/sink.py --folder DIR [--processes 12]

Prints its port, and serves until its input ends. Objects under `shards/` are dropped, those of the bucket `hashed` are
hashed and those of the bucket `rows` (raw shards, each in one request) digested row by row as they come, by the
product's own definition. What is left of a shard is its size, as a file with a hole, and its record. All other objects
are kept and served, so that a run resumes, after another start of this server too.

    DIR/objects/BUCKET/KEY           objects, and shards' sizes
    DIR/records/BUCKET/KEY.*.json    of each time that a shard came: {"size", "made"}, and `made` by the bucket is null,
                                     [SHA-256 of each part] or [{"rows", "digests"}]
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np
from null_s3 import Body, NullS3, Part, _xml

from ray_extract.capture.digest import add_digests, digest_ids, digest_tokens
from ray_extract.shards.image import ImageLayout, parse_layout

Answer = tuple[int, bytes, dict[str, str]]


class Kept:
    """A body in memory."""

    def __init__(self) -> None:
        self._data = bytearray()

    def update(self, block: memoryview | bytes) -> None:
        """See null_s3.Body."""
        self._data += block

    def hexdigest(self) -> bytes:
        """All of it."""
        return bytes(self._data)


class RowDigests:
    """Digests of the rows of a raw shard, taken while its bytes come; never holds more than a few blocks."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._rest = bytearray()  # of a token that is not whole yet
        self._at = 0
        self._layout: ImageLayout | None = None
        self._sums = np.zeros((0, 0), np.uint64)
        self._kept = np.zeros(1, np.int64)
        self._error: str | None = None

    def update(self, block: memoryview | bytes) -> None:
        """See null_s3.Body."""
        if self._error is None:
            try:
                self._take(memoryview(block))
            except (ValueError, KeyError, TypeError) as error:
                self._error = f"no raw shard: {error}"

    def hexdigest(self) -> dict[str, Any]:
        """Rows, by their index in the data set, and their digests as a commit has them; or `error`."""
        if self._error is None and (self._layout is None or self._at != self._layout.nbytes):
            self._error = f"cut short: {self._at} bytes"
        if self._error is not None:
            return {"error": self._error}
        assert self._layout is not None
        head = memoryview(self._head)
        ids, seqlens = self._layout.small(head, "input_ids"), self._layout.small(head, "cu_seqlens")
        for row in range(len(self._sums)):
            self._sums[row, 0] = digest_ids(ids[int(seqlens[row]) : int(seqlens[row + 1])].astype(np.int32, copy=False))
        return {"rows": self._layout.small(head, "row").tolist(), "digests": self._sums.tolist()}

    def _take(self, block: memoryview) -> None:
        if self._layout is None:
            self._head += block
            length = 8 + int.from_bytes(self._head[:8], "little")
            if len(self._head) < max(8, length):
                return
            layout = parse_layout(bytes(self._head[:length]))
            if len(self._head) < layout.states_offset:
                return
            self._layout, block = layout, memoryview(bytes(self._head[layout.states_offset :]))
            del self._head[layout.states_offset :]
            self._at = layout.states_offset
            self._kept = layout.small(memoryview(self._head), "cu_kept").astype(np.int64)
            self._sums = np.zeros((len(self._kept) - 1, 1 + len(layout.columns)), np.uint64)
        while block:
            block = block[self._step(block) :]

    def _step(self, block: memoryview) -> int:
        """Take the first bytes of a block, as far as they are of one kind; returns how many."""
        assert self._layout is not None
        for number, column in enumerate(self._layout.columns):
            tensor, width = self._layout.tensors[column.name], column.token_bytes
            if self._at < tensor.offset:
                count = min(len(block), tensor.offset - self._at)  # a pad
                break
            if self._at < tensor.offset + tensor.nbytes:
                token = (self._at - tensor.offset) // width
                count = min(len(block), tensor.offset + tensor.nbytes - self._at)
                if self._rest or count < width:
                    count = min(count, width - len(self._rest))
                    self._rest += block[:count]
                    if len(self._rest) == width:
                        self._add(number, token, np.frombuffer(bytes(self._rest), np.uint8).reshape(1, width))
                        self._rest.clear()
                else:
                    count -= count % width
                    tokens = np.frombuffer(block[:count], np.uint8).reshape(-1, width)
                    # Of blocks that begin at a multiple of 8, all but the first one's tokens do.
                    self._add(number, token, tokens if tokens.ctypes.data % 8 == 0 else tokens.copy())
                break
        else:
            raise ValueError(f"bytes after {self._at}")
        self._at += count
        return count

    def _add(self, state: int, token: int, tokens: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        end, row = token + len(tokens), int(np.searchsorted(self._kept, token, "right")) - 1
        while token < end:
            first, last = int(self._kept[row]), min(end, int(self._kept[row + 1]))
            part, tokens = tokens[: last - token], tokens[last - token :]
            self._sums[row, 1 + state] = add_digests(
                int(self._sums[row, 1 + state]), digest_tokens(part, token - first)
            )
            token, row = last, row + 1


class Sink(NullS3):
    """One process's part: nothing is shared but the folder.

    Args:
        root: see above.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(None)
        self._root = root
        for name in ("objects", "records", "uploads", "made"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def _body(self, method: str, target: str) -> Body | None:
        if not _forgotten(target):
            return Kept()
        if method == "PUT" and target.startswith("/rows/"):
            return RowDigests()
        return hashlib.sha256() if method == "PUT" and target.startswith("/hashed/") else None

    def _answer(self, method: str, target: str, fields: dict[str, str], part: Part) -> Answer:
        url = urlsplit(target)
        query, path = parse_qs(url.query, keep_blank_values=True), unquote(url.path)
        upload = query.get("uploadId", [""])[0]
        file = self._root / "objects" / path.lstrip("/")
        if method == "GET" and "list-type" in query:
            return self._list(file, query)
        if method in ("GET", "HEAD"):
            if not file.is_file():
                return 404, _xml("Error", Code="NoSuchKey") if method == "GET" else b"", {}
            if method == "HEAD":
                return 200, b"", {"Content-Length": str(file.stat().st_size)}
            return (501, _xml("Error", Code="Forgotten"), {}) if _forgotten(target) else _content(file, fields)
        if method == "DELETE":
            if upload:
                shutil.rmtree(self._root / "uploads" / upload, ignore_errors=True)
            else:
                file.unlink(missing_ok=True)
            return 204, b"", {}
        if method == "POST" and "uploads" in query:
            name = secrets.token_hex(8)
            (self._root / "uploads" / name).mkdir()
            return 200, _xml("InitiateMultipartUploadResult", UploadId=name), {}
        create = fields.get("if-none-match") == "*"
        if method == "PUT" and upload:
            place = self._root / "uploads" / upload / f"{int(query['partNumber'][0]):05d}"
            place.write_bytes(json.dumps(part).encode() if _forgotten(target) else part[1])
            return 200, b"", {}
        if method == "POST" and upload:
            folder = self._root / "uploads" / upload
            held = [each.read_bytes() for each in sorted(folder.iterdir())]
            if _forgotten(target):
                parts = [json.loads(each) for each in held]
                taken = self._forget(file, path, sum(size for size, _ in parts), [made for _, made in parts], create)
            else:
                taken = self._keep(file, b"".join(held), create)
            if not taken:
                return 412, _xml("Error", Code="PreconditionFailed"), {}
            shutil.rmtree(folder)
            return 200, _xml("CompleteMultipartUploadResult", ETag='"0"'), {}
        if method != "PUT":
            return 501, _xml("Error", Code="NotImplemented"), {}
        size, made = part
        taken = self._forget(file, path, size, [made], create) if _forgotten(target) else self._keep(file, made, create)
        return (200, b"", {}) if taken else (412, _xml("Error", Code="PreconditionFailed"), {})

    def _forget(self, file: Path, path: str, size: int, made: list[Any], create: bool) -> bool:
        record = self._root / "records" / f"{path.lstrip('/')}.{secrets.token_hex(8)}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"size": size, "made": made if any(made) else None}))
        hole = self._root / "made" / secrets.token_hex(8)
        with hole.open("xb") as new:
            new.truncate(size)
        return _link(hole, file, create)

    def _keep(self, file: Path, data: bytes, create: bool) -> bool:
        new = self._root / "made" / secrets.token_hex(8)
        new.write_bytes(data)
        return _link(new, file, create)

    def _list(self, bucket: Path, query: dict[str, list[str]]) -> Answer:
        prefix, after, delimiter = (query.get(name, [""])[0] for name in ("prefix", "start-after", "delimiter"))
        keys = sorted(file.relative_to(bucket).as_posix() for file in bucket.rglob("*") if file.is_file())
        lines, folders = [], set()
        for key in keys:
            if not key.startswith(prefix) or key <= after:
                continue
            inner = key[len(prefix) :]
            if delimiter and delimiter in inner:
                folders.add(prefix + inner.partition(delimiter)[0] + delimiter)
                continue
            with contextlib.suppress(FileNotFoundError):
                size = (bucket / key).stat().st_size
                lines.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>&quot;0&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                )
        lines += [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)]
        text = f"<Name>{bucket.name}</Name><KeyCount>{len(lines)}</KeyCount><IsTruncated>false</IsTruncated>"
        head = '<?xml version="1.0" encoding="UTF-8"?>'
        return 200, f"{head}<ListBucketResult>{text}{''.join(lines)}</ListBucketResult>".encode(), {}


def _forgotten(target: str) -> bool:
    return "/shards/" in target.partition("?")[0]


def _content(file: Path, fields: dict[str, str]) -> Answer:
    size, span = file.stat().st_size, fields.get("range")
    if span is None:
        return 200, file.read_bytes(), {}
    first, _, last = span.removeprefix("bytes=").partition("-")
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    with file.open("rb") as stream:
        stream.seek(start)
        return 206, stream.read(end - start), {"Content-Range": f"bytes {start}-{end - 1}/{size}"}


def _link(new: Path, file: Path, create: bool) -> bool:
    """Give an object its name; returns whether it has it, which with `create` it has not if the name was taken."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not create:
        new.replace(file)
        return True
    try:
        os.link(new, file)
    except FileExistsError:
        return False
    finally:
        new.unlink()
    return True


def _serve(root: Path, ours: socket.socket, others: list[socket.socket]) -> None:
    """A process: takes connections from the first one until that is gone."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sink = Sink(root)
    while True:
        _, found, _, _ = socket.recv_fds(ours, 1, 1)
        if not found:
            return
        threading.Thread(target=sink.serve, args=(socket.socket(fileno=found[0]),), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=12)
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    context = multiprocessing.get_context("fork")
    theirs: list[socket.socket] = []
    for _ in range(args.processes):
        mine, its = socket.socketpair()
        context.Process(target=_serve, args=(args.folder, its, [listener, mine, *theirs]), daemon=True).start()
        its.close()
        theirs.append(mine)

    def accept() -> None:
        # In turn: a client opens as many connections as it uses at once.
        for turn in range(1 << 62):
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection:
                socket.send_fds(theirs[turn % len(theirs)], [b"c"], [connection.fileno()])

    threading.Thread(target=accept, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
