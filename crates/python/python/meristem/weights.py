"""Weights files: tensors and metadata."""

import json
import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _meristem
from ._arguments import path as path_of
from ._arguments import refused
from .errors import SettingError, WeightsError

#: The remedy for a file that cannot be read.
REMEDY = "give a .safetensors file; a run has them in RUN/weights"


@dataclass(frozen=True)
class Weights:
    """Weights of a host with its modules."""

    #: Tensors with PyTorch's names and shapes, such as ``blocks.0.conv.weight``.
    tensors: "dict[str, npt.NDArray[Any]]"
    #: Metadata of the file, such as ``topology``, ``host``, ``normalization`` and ``classes``.
    metadata: dict[str, Any]

    @property
    def contents(self) -> bytes:
        """The contents of a weights file with these tensors and metadata.

        Raises:
            WeightsError: A tensor is not an array of float32, int64 or uint8, or metadata cannot be
                encoded as JSON.
        """
        texts = {_name("metadata", key): _text(key, value) for key, value in self.metadata.items()}
        tensors = {_name("tensors", name): _given(name, x) for name, x in self.tensors.items()}
        return _meristem.encode_weights(tensors, texts)

    def save(self, path: "str | PathLike[str]") -> None:
        """Writes a weights file, which must not exist.

        Raises:
            WeightsError: As :attr:`contents`.
            OSError: The file exists or cannot be written.
        """
        contents = self.contents
        with Path(path_of("path", path, WeightsError)).open("xb") as file:
            file.write(contents)

    def svg(self) -> str:
        """A drawing of the host and its modules, as the text of an SVG file. Notebooks show it. A slot
        with a module has the colour of its stage.

        Raises:
            WeightsError: There is no topology, or it is damaged.
        """
        topology = self.metadata.get("topology")
        try:
            if topology is None:
                raise KeyError("topology")
            slots = [(slot["slot"], slot["stage"], _slot_text(slot)) for slot in topology["slots"]]
            return _meristem.host_svg(topology["host"], slots)
        except (TypeError, KeyError, SettingError) as error:
            remedy = "give a weights file that meristem wrote"
            raise WeightsError("the weights have no sound `topology`", [str(error)], remedy) from error

    def _repr_svg_(self) -> str | None:
        return self.svg() if "topology" in self.metadata else None


def _slot_text(slot: dict[str, Any]) -> str:
    """The blueprint of a slot's module, or the slot's stage."""
    text: str = (slot.get("module") or {}).get("blueprint", slot["stage"])
    return text


def load(path: "str | PathLike[str]") -> Weights:
    """Reads a weights file.

    A prefix of all names from PyTorch's wrappers, ``module.`` or ``_orig_mod.``, is removed with a
    ``UserWarning``.

    Raises:
        WeightsError: The file cannot be read, or is not safetensors.
    """
    path = path_of("path", path, WeightsError)
    file = Path(path)
    if file.exists() and not file.is_file():
        # Reading a pipe would wait for its writer.
        found = "a folder" if file.is_dir() else "a pipe or a device"
        problem = f"cannot read {path}: expected a plain file, got {found}"
        raise WeightsError(problem, remedy=REMEDY)
    try:
        contents = file.read_bytes()
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}", remedy=REMEDY) from error
    return parse(contents, path)


def parse(contents: bytes, name: str = "weights") -> Weights:
    """Parses the contents of a weights file. Errors refer to the file as ``name``.

    Raises:
        WeightsError: The contents are not safetensors.
    """
    arrays, texts, prefix = _meristem.decode_weights(name, contents)
    if prefix is not None:
        problem = f"{name}: the names of all tensors begin with `{prefix}`; the prefix is left out"
        warnings.warn(problem, UserWarning, stacklevel=3)
    tensors = {name: np.from_dlpack(array) for name, array in arrays.items()}
    return Weights(tensors, {key: _value(text) for key, text in texts.items()})


def _name(of: str, name: object) -> str:
    if not isinstance(name, str):
        raise refused(of, name, "names that are text", WeightsError)
    return name


def _value(text: str) -> Any:
    """Parses a value of metadata: JSON objects and arrays; other text is unchanged."""
    try:
        return json.loads(text) if text[:1] in ("{", "[") else text
    except (ValueError, RecursionError):
        return text


def _text(key: str, value: object) -> str:
    try:
        if isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refused(f"metadata[{key!r}]", value, f"JSON ({error})", WeightsError) from None


def _given(name: str, tensor: object) -> dict[str, Any]:
    array = np.asarray(tensor)
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": array.shape, "contents": little.tobytes()}
