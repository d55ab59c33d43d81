"""Errors of the package: one tree under :class:`MeristemError`.

``str(error)`` is what the command line prints: the message, its causes, and what to do.
"""

from collections.abc import Sequence


class MeristemError(Exception):
    """Base of all errors of this package.

    Attributes:
        message: The error itself.
        causes: The errors behind it that the message does not quote.
        remedy: What to do, if there is something to be said.
        exit_code: The exit code with which the command line would end: 2 for a wrong request,
            which has changed nothing, 1 for a failure.
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
    """An argument that a call does not accept: a tensor's element type, device or layout, a number."""


class SettingError(MeristemError, ValueError):
    """A setting is unknown, or has a value that it does not accept."""


class RunFolderError(MeristemError):
    """A run folder exists already, is not that of a run, or cannot be read or written."""


class ResumeError(RunFolderError):
    """A run cannot be resumed: its folder, its checkpoint, or the settings given for it."""


class DataError(MeristemError):
    """A dataset is missing, damaged, or used wrongly."""


class WeightsError(MeristemError):
    """A weights file cannot be read, or does not fit."""


class DeviceError(MeristemError):
    """A device refused an operation, or failed."""


class OutOfMemory(DeviceError, MemoryError):
    """A device has too little memory."""


class DivergedError(MeristemError):
    """Training diverged, and rolling back did not help."""


class ControllerError(MeristemError):
    """A controller failed, or asked for an action that is not legal."""


class RankError(MeristemError):
    """A rank failed, or lost contact."""


class StateError(MeristemError):
    """A call does not fit the state of its object, its thread, or its process."""


class InternalError(MeristemError):
    """A bug in meristem."""
