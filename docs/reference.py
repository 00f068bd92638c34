"""Write docs/configuration.md and docs/cli.md from the code: every key of a job, and every command.

python docs/reference.py [--check]
"""

import argparse
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
from pydantic import ByteSize
from pydantic_core import PydanticUndefined

from ray_extract import cli
from ray_extract.config import Job

DOCS = Path(__file__).parent

_CONFIGURATION = """# Configuration

Every key of a job file, from the models that check it (`ray_extract/config.py`), by `docs/reference.py`. Any of them
can be given on the command line as `section.key=value`. Unknown keys are refused. `${oc.env:NAME}` stands for an
environment variable.

A size is a number of bytes, or one with a unit: `2GiB`, `500MB`.
"""
_CLI = """# Commands

Every command, from its own parser, by `docs/reference.py`. `python -m ray_extract.run` is `ray-extract run`. Exit codes
are in [When something fails](failures.md).
"""


def configuration() -> str:
    """The page of all keys."""
    return "\n".join([_CONFIGURATION, *_section("", Job)])


def _section(prefix: str, model: type[pydantic.BaseModel]) -> Iterator[str]:
    sections = {name: field for name, field in model.model_fields.items() if _model(field.annotation)}
    keys = [name for name in model.model_fields if name not in sections]
    if prefix:
        yield f"## {prefix}\n"
        yield f"{_text(model.__doc__ or '')}\n"
    if keys:
        yield "| key | type | default | |"
        yield "| --- | --- | --- | --- |"
        for name in keys:
            field = model.model_fields[name]
            yield f"| `{name}` | {_type(field)} | {_default(field)} | {_text(field.description or '')} |"
        yield ""
    for name, field in sections.items():
        nested = _model(field.annotation)
        assert nested is not None
        yield from _section(f"{prefix}.{name}" if prefix else name, nested)


def _model(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The section that a field holds, alone or in a list or perhaps."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model(part))), None)


def _type(field: Any) -> str:
    return _name(field.annotation).replace("|", "\\|")


def _name(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(f"`{part}`" for part in parts)
    if origin is typing.Annotated:
        return _name(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_name(part) for part in parts if part is not type(None))
    if origin is tuple:
        return f"list of {_name(parts[0])}"
    if origin is dict:
        return "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true | false", ByteSize: "size"}.get(
        annotation, str(getattr(annotation, "__name__", annotation))
    )


def _default(field: Any) -> str:
    if field.default_factory is not None:
        return "none" if not field.default_factory() else f"`{field.default_factory()}`"
    value = field.default
    if value is PydanticUndefined:
        return "**required**"
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return ", ".join(f"`{part}`" for part in value) or "none"
    sized = any(isinstance(part, type) and issubclass(part, ByteSize) for part in (field.annotation, type(value)))
    return f"`{ByteSize(value).human_readable()}`" if sized else f"`{value}`"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands() -> str:
    """The page of all commands."""
    found = next(a for a in cli.make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in found._choices_actions}
    lines = [_CLI]
    for name, parser in found.choices.items():
        what = parser.description or helps[name]
        lines += [f"## ray-extract {name}\n", f"{_text(what[:1].upper() + what[1:]).rstrip('.')}.\n"]
        lines += ["| | |", "| --- | --- |"]
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
                lines.append(f"| {_argument(action)} | {_text((action.help or '').replace('%%', '%'))} |")
        lines.append("")
    return "\n".join(lines)


def _argument(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if action.choices:
        value = " or ".join(map(str, action.choices))
    if not action.option_strings:
        return f"`{value}`"
    return f"`{action.option_strings[-1]}{'' if action.nargs == 0 else f' {value}'}`"


def pages() -> dict[Path, str]:
    """Both pages as they must be."""
    return {DOCS / "configuration.md": configuration(), DOCS / "cli.md": commands()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    args = parser.parse_args()
    stale = {page: text for page, text in pages().items() if not page.exists() or page.read_text() != text}
    for page, text in stale.items():
        if args.check:
            print(f"{page.name} is not as the code says; run python docs/reference.py")
        else:
            page.write_text(text)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
