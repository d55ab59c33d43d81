"""Checks of arguments. Errors name the argument, its value and the expected values."""

import operator
from collections.abc import Iterable, Mapping, Set
from os import PathLike, fspath
from reprlib import repr as short
from typing import Any

import numpy as np

from .errors import ArgumentError, MeristemError, SettingError

REMEDY = "give another value, or leave it out"
#: Largest integers of the engine.
U32_MAX = 2**32 - 1
I64_MAX = 2**63 - 1


def refused(
    name: str,
    got: object,
    expected: str,
    error: type[MeristemError] = ArgumentError,
    remedy: str = REMEDY,
) -> MeristemError:
    """The error for an argument, with its value and the expected values."""
    return error(f"`{name}`: got {short(got)}, expected {expected}", (), remedy, 2)


def index(value: object) -> int | None:
    """Converts integers, including numpy's; ``None`` for booleans, floats and other types."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def integer(
    name: str,
    value: object,
    low: int = 0,
    high: int = I64_MAX,
    error: type[MeristemError] = ArgumentError,
) -> int:
    """Checks that a value is an integer from ``low`` to ``high``."""
    number = index(value)
    if number is None or not low <= number <= high:
        kind = "a whole number, " if number is None else ""
        limits = f"at least {low}" if high == I64_MAX else f"{low} to {high}"
        raise refused(name, value, kind + limits, error)
    return number


def optional(
    name: str,
    value: object,
    low: int = 0,
    high: int = I64_MAX,
    error: type[MeristemError] = ArgumentError,
) -> int | None:
    """Checks that a value is an integer from ``low`` to ``high``, or ``None``."""
    return None if value is None else integer(name, value, low, high, error)


def real(name: str, value: object, error: type[MeristemError] = ArgumentError) -> float:
    """Checks that a value is a number, which may be NaN."""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise refused(name, value, "a number", error) from None


def flag(name: str, value: object, error: type[MeristemError] = ArgumentError) -> bool:
    """Checks that a value is a boolean."""
    if not isinstance(value, bool | np.bool_):
        raise refused(name, value, "True or False", error)
    return bool(value)


def text(name: str, value: object, error: type[MeristemError] = ArgumentError) -> str:
    """Checks that a value is a string without lone surrogates."""
    try:
        if not isinstance(value, str):
            raise TypeError
        value.encode()
    except (TypeError, UnicodeEncodeError):
        raise refused(name, value, "text", error) from None
    return value


def path(
    name: str, value: "str | PathLike[str]", error: type[MeristemError] = ArgumentError
) -> str:
    """Checks that a value is a path."""
    try:
        found = fspath(value)
        if not isinstance(found, str) or "\0" in found:
            raise TypeError
    except TypeError:
        raise refused(name, value, "a path", error) from None
    return found


def sequence(
    name: str, value: object, expected: str, error: type[MeristemError] = ArgumentError
) -> list[Any]:
    """Returns the items of a sequence, an array or a generator."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise refused(name, value, expected, error)
    try:
        return list(value)
    except TypeError:  # an array of no dimension
        raise refused(name, value, expected, error) from None


def configuration(
    config: "str | PathLike[str] | Mapping[str, Any] | None",
) -> str | dict[str, Any] | None:
    """Checks the argument ``config``: a path or a mapping."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        return path("config", config, SettingError)
    for key in config:
        text("config", key, SettingError)
    return dict(config)


def function(name: str, value: object, expected: str) -> Any:
    """Checks that a value is a function, or ``None``."""
    if value is not None and not callable(value):
        raise refused(name, value, expected, SettingError)
    return value
