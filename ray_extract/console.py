"""What a command says to whoever started it, who may have stopped listening: `ray-extract verify OUT | head`."""

import argparse
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

ENDED = "ended at once, on request; run the same command again to go on"
"""What a run that a signal ended says."""


def tell(*lines: str) -> None:
    """Write lines to standard output. Once nobody reads it, they go nowhere; what the command does, it does."""
    _write(sys.stdout, "".join(f"{line}\n" for line in lines))


def pass_on(text: str) -> None:
    """As tell, a text as it comes, which need not end with its line."""
    _write(sys.stdout, text)


def complain(error: object) -> None:
    """Say on standard error what stopped the command."""
    _write(sys.stderr, f"error: {error}\n")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Ends the process where they ask for help, or are wrong."""
    try:
        return parser.parse_args(argv)
    finally:
        tell()  # the help may wait in a buffer


def end_on_signal(code: int, *words: str) -> None:
    """Let SIGTERM and SIGINT end the process at once from now on: for where there is nothing to put in order.

    Args:
        code: its exit code.
        words: what it then says, a line each.
    """

    def end(*_: object) -> NoReturn:
        for word in words:
            os.write(sys.stderr.fileno(), f"error: {word}\n".encode())
        os._exit(code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def leave(code: int) -> NoReturn:
    """End the process. What ends with it, as Ray does, may take seconds, which a signal cuts short.

    Not by sys.exit: on that way Python at last gives signals their first meaning back, by which they end it otherwise.
    """
    end_on_signal(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # Python would try again, and say so, when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
