"""The command ray-extract, also as python -m ray_extract: cli.py, and words for a signal from the first moment on."""

import signal
from typing import NoReturn

from ray_extract.console import ENDED, end_on_signal, leave
from ray_extract.errors import Exit


def main() -> NoReturn:
    """The command, as a process of its own."""
    end_on_signal(Exit.STOPPED, ENDED)
    from ray_extract import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)  # what Ctrl-C ends is each command's to say
    leave(cli.main())


if __name__ == "__main__":
    main()
