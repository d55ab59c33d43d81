"""Custom losses: the program's function, and the check of the arrays that it returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _meristem
from ._arguments import function, refused
from ._tables import described, numpy_of
from .errors import ArgumentError, MeristemError


@dataclass(frozen=True)
class OnDevice:
    """A custom loss that computes on arrays in the memory of the training device, without copies.

    The function gets the outputs and targets as :class:`meristem.Array`, which
    ``torch.from_dlpack`` and others take without a copy: on a CUDA device they are tensors of this device.
    It returns float32 arrays on the same device, whose memory is read before it is called again.
    """

    function: Callable[[_meristem.Array, _meristem.Array], "tuple[Any, Any]"]


#: A function of the outputs of a network, float32 [samples, outputs], and of the targets: the class of
#: each sample, int32 [samples], or labels or standardised numbers, float32 [samples, outputs]. It returns
#: the loss of each sample, [samples], and the gradient of each sample's loss with respect to its outputs,
#: [samples, outputs], as arrays of numpy, PyTorch or JAX. Or a function of arrays on the device.
Loss = Callable[["npt.NDArray[np.float32]", "npt.NDArray[Any]"], "tuple[Any, Any]"] | OnDevice

PAIR = "a pair: the loss of each sample, and its gradient with respect to the outputs of the sample"


def loss_setting(loss: "str | Loss | None", settings: dict[str, Any]) -> Any:
    """The hook for a function, and the setting ``loss``."""
    if loss is None or isinstance(loss, str):
        if loss is not None:
            settings["loss"] = loss
        return None
    settings["loss"] = "external"
    return loss_hook(loss)


def loss_hook(loss: object) -> Any:
    """The function as the engine calls it; ``None`` without one."""
    if isinstance(loss, OnDevice):
        return _device_hook(loss.function)
    own = function("loss", loss, "a function of outputs and targets, or the name of a loss")
    if own is None:
        return None

    def call(
        outputs: _meristem.Array, targets: _meristem.Array, in_training: bool
    ) -> "tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]":
        seen = np.from_dlpack(outputs)
        returned = own(seen, np.from_dlpack(targets))
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise refused("loss", returned, PAIR)
        losses = floats("losses", returned[0], seen.shape[:1])
        # The gradient of an evaluation is not used.
        return losses, floats("gradient", returned[1], seen.shape) if in_training else None

    return call


def _device_hook(given: object) -> Any:
    """The function of arrays on the device as the engine calls it."""
    own = function("loss", given, "a function of outputs and targets")
    if own is None:
        raise refused("loss", given, "a function of outputs and targets")

    def call(
        outputs: _meristem.Array, targets: _meristem.Array, in_training: bool, factor: float
    ) -> "tuple[Any, Any]":
        returned = own(outputs, targets)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise refused("loss", returned, PAIR)
        # PyTorch lends no tensor that is part of a graph of autograd.
        losses, gradient = (getattr(x, "detach", lambda x=x: x)() for x in returned)
        return losses, gradient * factor if in_training else None

    call.is_on_device = True  # type: ignore[attr-defined]
    return call


def floats(name: str, value: Any, shape: "tuple[int, ...]") -> "npt.NDArray[np.float32]":
    """An array of the function as the engine reads it."""
    try:
        array = numpy_of(name, value)
    except MeristemError as error:
        raise ArgumentError(f"loss: {error.message}", error.causes, error.remedy, 2) from error
    if array.dtype.kind not in "iuf" or array.shape != shape:
        message = f"loss: `{name}`: got {described(value, array)}, expected numbers of shape {list(shape)}"
        raise ArgumentError(message, (), f"return {PAIR}", 2)
    return np.require(array, np.float32, ["C", "W", "A"])

