"""What a command says to whoever started it, who may have stopped listening: `ray-extract verify OUT | head`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TextIO


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


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # Python would try again, and say so, when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
