"""What a reader may be given, checked where it is given: a wrong one is a ConfigError that names it."""

import operator
from typing import Any

from ray_extract.errors import ConfigError


def whole(name: str, value: Any, least: int | None = 0) -> int:
    """An argument that is a whole number.

    Args:
        name: of the argument.
        value: an int, or what NumPy and PyTorch have in its place.
        least: what it must be at least, if anything.

    Raises:
        ConfigError: it is none, or too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}: must be a whole number")
    if least is not None and number < least:
        raise ConfigError(f"{name} = {value}: must {f'be at least {least}' if least else 'not be negative'}")
    return number
