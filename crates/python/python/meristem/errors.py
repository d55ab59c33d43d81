"""Errors of the package: one tree under :class:`MeristemError`.

``str(error)`` has the text of the command line: the message, its causes, and a remedy.
"""

from collections.abc import Sequence


class MeristemError(Exception):
    """Base of all errors of this package.

    Attributes:
        message: The error, without causes.
        causes: Its causes that the message does not quote.
        remedy: A remedy; ``None`` if there is none.
        exit_code: The exit code of the command line: 2 for a wrong request, which has changed
            nothing; 1 for a failure.
    """

    message: str
    causes: Sequence[str]
    remedy: str | None
    exit_code: int

    def __init__(
        self,
        message: str = "",
        causes: Sequence[str] = (),
        remedy: str | None = None,
        exit_code: int = 1,
    ) -> None:
        lines = [message, *(f"  cause: {cause}" for cause in causes)]
        if remedy is not None:
            lines.append(f"  help: {remedy}")
        super().__init__("\n".join(lines))
        self.message = message
        self.causes = tuple(causes)
        self.remedy = remedy
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.causes, self.remedy, self.exit_code)


class ArgumentError(MeristemError, ValueError):
    """An invalid argument: a number, or the element type, device or layout of a tensor."""


class SettingError(MeristemError, ValueError):
    """A setting is unknown, its value is invalid, or no host computes the same as a PyTorch module."""


class RunFolderError(MeristemError):
    """A run folder already exists, is not a run folder, or cannot be read or written."""


class ResumeError(RunFolderError):
    """A run cannot be resumed: its folder, its checkpoint, or the settings given for it."""


class DataError(MeristemError):
    """A dataset is missing, damaged, or used wrongly."""


class WeightsError(MeristemError):
    """A weights file cannot be read, or does not match the host or the data."""


class DeviceError(MeristemError):
    """A device refused an operation, or failed."""


class OutOfMemory(DeviceError, MemoryError):
    """A device has too little memory."""


class DivergedError(MeristemError):
    """Training diverged, and rolling back did not help."""


class ControllerError(MeristemError):
    """A controller failed, or returned an illegal action."""


class RankError(MeristemError):
    """A rank failed, or lost contact."""


class StateError(MeristemError):
    """A call does not fit the state of its object, its thread, or its process."""


class InternalError(MeristemError):
    """A bug in meristem."""
