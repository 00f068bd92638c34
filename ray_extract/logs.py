"""How the processes of a run log: lines for people, or one JSON object a line, with what they are about.

A record's fields are those of its process (`identify`), of the thread's work (`about`), and its own (`extra=`).
"""

import contextlib
import datetime
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar

FIELDS = ("run", "node", "engine", "unit", "attempt")
"""What a line of JSON says beside time, level, logger and message, as far as it is known."""

_process: dict[str, str | int] = {}
_work: ContextVar[dict[str, str | int] | None] = ContextVar("ray_extract_logs", default=None)


class JsonFormatter(logging.Formatter):
    """A record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. Of a record it takes FIELDS and what is written here, and nothing else that may be in it."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        known = {**_process, **(_work.get() or {}), **record.__dict__}
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: known[name] for name in FIELDS if name in known},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, to be known again."""


def configure(log_format: str) -> None:
    """Log to standard error from INFO on, or go on with another format; nothing where somebody else set up logging.

    Args:
        log_format: see config.RunConfig.log_format.
    """
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_Handler(sys.stderr))
        root.setLevel(logging.INFO)
    formatter = (
        JsonFormatter() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname).1s %(message)s")
    )
    for handler in root.handlers:
        if isinstance(handler, _Handler):
            handler.setFormatter(formatter)


def identify(**fields: str | int) -> None:
    """Name the run and the like for all lines of this process from now on."""
    _process.update(fields)


@contextlib.contextmanager
def about(**fields: str | int) -> Iterator[None]:
    """Name the unit and the like for the lines of this thread in the context."""
    before = _work.set({**(_work.get() or {}), **fields})
    try:
        yield
    finally:
        _work.reset(before)
