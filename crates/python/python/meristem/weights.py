"""Weights files: tensors and metadata."""

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import WeightsError

DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "U8": np.uint8}


@dataclass(frozen=True)
class Weights:
    """Weights of a host with its modules."""

    #: By PyTorch's names and in PyTorch's shapes, such as ``blocks.0.conv.weight``.
    tensors: "dict[str, npt.NDArray[Any]]"
    #: Metadata of the file: ``topology``, ``normalization`` and ``classes``.
    metadata: dict[str, Any]
    #: Contents of the file.
    contents: bytes

    def save(self, path: "str | PathLike[str]") -> None:
        """Writes a weights file, which must not exist."""
        with Path(path).open("xb") as file:
            file.write(self.contents)


def load(path: "str | PathLike[str]") -> Weights:
    """Reads a weights file.

    Raises:
        WeightsError: It cannot be read, or is not safetensors.
    """
    try:
        contents = Path(path).read_bytes()
    except OSError as error:
        remedy = "give a .safetensors file; those of a run are in RUN/weights"
        raise WeightsError(f"cannot read {path}: {error.strerror}", remedy=remedy) from error
    return parse(contents, str(path))


def parse(contents: bytes, name: str = "weights") -> Weights:
    """Reads the contents of a weights file.

    Raises:
        WeightsError: They are not safetensors.
    """
    try:
        return _parse(contents)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "give a .safetensors file; those of a run are in RUN/weights"
        raise WeightsError(f"{name} is not a safetensors file: {error}", remedy=remedy) from error


def _parse(contents: bytes) -> Weights:
    length = int.from_bytes(contents[:8], "little")
    if len(contents) < 8 or length > len(contents) - 8:
        raise ValueError("its header is cut off")
    header = json.loads(contents[8 : 8 + length])
    data = memoryview(contents)[8 + length :]
    texts = header.pop("__metadata__", {})
    metadata = {
        name: json.loads(text) if text[:1] in "{[" else text for name, text in texts.items()
    }
    tensors = {}
    for name, about in header.items():
        start, end = about["data_offsets"]
        if not 0 <= start <= end <= len(data):
            raise ValueError(f"tensor {name} lies outside of the file")
        tensors[name] = np.frombuffer(data[start:end], DTYPES[about["dtype"]]).reshape(
            about["shape"]
        )
    return Weights(tensors, metadata, contents)
