"""The network in a weights file: its outputs, and its predictions.

The metadata of the file describes the layers of the host (``host``), and its modules and their
blueprints (``topology``). :func:`forward` applies them with the operations of a :class:`Library`.
:mod:`meristem.torch` implements these for PyTorch, and :class:`Numpy` as a simple reference.
"""

import json
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _meristem
from ._forward import FUNCTIONS, Library, forward
from ._numpy import Numpy
from .errors import WeightsError
from .weights import Weights, load

__all__ = [
    "FUNCTIONS",
    "Library",
    "Numpy",
    "as_images",
    "check_outputs",
    "forward",
    "host_of",
    "input_kind",
    "logits",
    "normalization",
    "predictions",
    "read",
    "task_of",
    "topology_of",
]

#: Supported versions of the entries of the metadata.
VERSIONS = {"topology": (1,), "host": (1, 2)}


def topology_of(weights: Weights) -> dict[str, Any]:
    """The topology in the metadata.

    Raises:
        WeightsError: There is no topology, or its version is not supported.
    """
    topology = weights.metadata.get("topology")
    if not isinstance(topology, dict):
        remedy = "give a weights file that meristem wrote"
        raise WeightsError("the weights have no `topology` in their metadata", remedy=remedy)
    return _checked("topology", topology)


def host_of(weights: Weights) -> dict[str, Any]:
    """The host in the metadata: its ``layers`` in forward order, and the names of its ``slots``.

    For a file of an older version, which lacks this entry, layers and slots follow from the
    description of the host in the topology.

    Raises:
        WeightsError: As :func:`topology_of`.
    """
    text = topology_of(weights)["host"]
    host = weights.metadata.get("host") or json.loads(_meristem.host_json(text))
    return _checked("host", host)


def _checked(entry: str, value: dict[str, Any]) -> dict[str, Any]:
    """Checks the version of an entry of the metadata."""
    known = VERSIONS[entry]
    if (version := value.get("version")) not in known:
        message = f"the {entry} has version {version}, this package reads up to {known[-1]}"
        raise WeightsError(message, remedy="use the version of meristem that wrote the file")
    return value


def read(weights: "str | PathLike[str] | Weights") -> Weights:
    """Reads a weights file if a path is given."""
    return weights if isinstance(weights, Weights) else load(weights)


def logits(
    weights: "str | PathLike[str] | Weights", images: "npt.ArrayLike"
) -> "npt.NDArray[np.float64]":
    """The outputs (N, K) of the network, computed by numpy in float64. Slow, for reference.

    The samples are normalised images (N, C, H, W), signals (N, C, L) or vectors (N, F).
    :func:`predictions` converts the outputs to probabilities or numbers.
    """
    weights = read(weights)
    library, host, topology = Numpy(weights.tensors), host_of(weights), topology_of(weights)
    x = as_images(input_kind(weights), np.asarray(images, np.float64))
    result: npt.NDArray[np.float64] = forward(library, host, topology, x)
    return result


def predictions(weights: "str | PathLike[str] | Weights", outputs: Any) -> Any:
    """Predictions from the outputs (N, K) of a network: probabilities of the classes, the probability
    of each label, or numbers in the units of the targets.

    Raises:
        WeightsError: The outputs have another shape.
    """
    weights = read(weights)
    task, scale = task_of(weights)
    outputs = np.asarray(outputs, np.float64)
    check_outputs(outputs.shape, len(weights.metadata.get("classes", [])))
    if task == "multilabel":
        return 1 / (1 + np.exp(-outputs))
    if scale is not None:
        return outputs * np.asarray(scale[1]) + np.asarray(scale[0])
    if task == "regress":
        return outputs
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def check_outputs(shape: tuple[int, ...], names: int) -> None:
    """Checks the shape of outputs, if the number of outputs is known.

    Raises:
        WeightsError: Another shape.
    """
    if len(shape) != 2 or names not in (0, shape[1]):
        got, expected = f"outputs {list(shape)}", f"[N, {names or 'K'}]"
        remedy = "give the outputs of the network, a row for each sample"
        raise WeightsError(f"`outputs`: got {got}, expected {expected}", remedy=remedy)


def task_of(weights: Weights) -> tuple[str, tuple[Sequence[float], Sequence[float]] | None]:
    """``classify``, ``multilabel`` or ``regress``; and mean and standard deviation of the training
    targets of each output, if these are standardised numbers."""
    about = weights.metadata.get("outputs", {})
    scale = about.get("scale")
    return about.get("task", "classify"), scale and (scale["mean"], scale["std"])


def input_kind(weights: Weights) -> str:
    """``image``, ``signal`` or ``vector``: the samples that the network was trained on."""
    kind: str = weights.metadata.get("inputs", {}).get("kind", "image")
    return kind


def as_images(kind: str, x: Any) -> Any:
    """Samples as images (N, C, H, W): signals have one row, vectors one pixel."""
    if kind == "image":
        return x
    columns = (1,) if kind == "vector" else x.shape[2:]
    return x.reshape(*x.shape[:2], 1, *columns)


def normalization(weights: Weights) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and standard deviation per channel of the stored values, where bytes count as 0..1."""
    about = weights.metadata["normalization"]
    return about["mean"], about["std"]
