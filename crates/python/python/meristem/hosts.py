"""Hosts: the networks in which modules grow."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from . import _meristem
from ._arguments import integer, path, refused, sequence, text
from .errors import SettingError
from .nn import Layer, description, layers_of


@dataclass(frozen=True)
class LayerSummary:
    """A layer or slot of a host, for images of one shape."""

    #: Prefix of the tensor names, or name of the slot; ``None`` for a layer without a name.
    name: str | None
    #: Kind of the layer, with its kernel, such as ``conv 3×3``; ``slot`` for a slot.
    layer: str
    #: Number of residual layers and branches around it.
    depth: int
    #: Channels, rows and columns of the output for one image.
    output: tuple[int, int, int]
    #: Trained parameters.
    parameters: int
    #: Multiply-accumulate operations per image.
    macs: int


@dataclass(frozen=True)
class HostSummary:
    """Sizes of a host without modules, for images of one shape. ``print`` shows a table."""

    #: Name of the host.
    name: str
    #: Complete description of the host.
    host: str
    #: Channels, rows and columns of an image.
    input: tuple[int, int, int]
    #: Classes of the dataset.
    classes: int
    #: Layers in forward order.
    layers: list[LayerSummary]
    #: Number of slots.
    slots: int
    #: Trained parameters.
    parameters: int
    #: Multiply-accumulate operations per image, in evaluation.
    macs: int

    def __str__(self) -> str:
        head = ("name", "layer", "output", "parameters", "MACs")
        rows = [head, *(_row(layer) for layer in self.layers)]
        rows.append(("", "all", "", f"{self.parameters:,}", f"{self.macs:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.name if self.host.startswith("{") else self.host]
        for row in rows:
            left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join(left + right))
        return "\n".join(lines)


def _row(layer: LayerSummary) -> tuple[str, ...]:
    sizes = (f"{n:,}" if n else "" for n in (layer.parameters, layer.macs))
    kind = "· " * layer.depth + layer.layer
    return (layer.name or "", kind, "×".join(map(str, layer.output)), *sizes)


class Host:
    """A host without modules.

    ``Host("resnet8")`` is a ready-made host, ``Host("cnn:channels=12,blocks=4,kernel=5,pools=3")`` a
    description, ``Host("own.toml")`` a file, and ``Host(Conv2d(16, 3), …)`` a list of layers of
    :mod:`meristem.nn`. The setting ``host`` accepts a host.
    """

    def __init__(
        self,
        first: "str | PathLike[str] | Layer",
        *layers: Layer,
        name: str | None = None,
        slots: Iterable[str] | None = None,
    ) -> None:
        """Checks the description.

        Args:
            first: Text or path, or the first layer.
            layers: Further layers.
            name: Name for tables and plots; for hosts of layers.
            slots: Slots in the order of action indices, forward order unless given; for hosts of
                layers.

        Raises:
            SettingError: There is no such host, or the description is unusable.
        """
        if isinstance(first, Layer):
            value = dict(description([first, *layers], name))
            if slots is not None:
                value["slots"] = sequence("slots", slots, "names of slots", SettingError)
            given = json.dumps(value)
        elif layers or name is not None or slots is not None:
            raise refused("first", first, "a layer, as `layers`, `name` and `slots` require", SettingError)
        elif isinstance(first, PathLike):
            given = path("first", first, SettingError)
        else:
            given = text("first", first, SettingError)
        #: The complete description: ``cnn:…``, ``mlp:…``, ``conv1d:…``, or one line of JSON.
        self.description: str = _meristem.host_description(given)
        # The value of the setting `host`; a later change of a file has no effect.
        self._setting = _meristem.host_text(self.description)

    def __repr__(self) -> str:
        return f"Host({self._setting!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Host) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(json.dumps(self._value()))

    def _value(self) -> list[Any]:
        value = json.loads(_meristem.host_json(self.description))
        return [value["layers"], value["slots"]]

    @property
    def layers(self) -> list[Layer]:
        """The layers, with all names."""
        return layers_of(self._value()[0])

    def save(self, file: "str | PathLike[str]") -> None:
        """Writes the description to a JSON file, which must not exist.

        Raises:
            SettingError: The name does not end in ``.json``.
            OSError: The file exists or cannot be written.
        """
        where = path("file", file, SettingError)
        if not where.endswith(".json"):
            raise refused("file", where, "a name that ends in .json", SettingError)
        value = json.loads(_meristem.host_json(self.description))
        with open(where, "x", encoding="utf-8") as out:
            json.dump(value, out, indent=1)
            out.write("\n")

    def svg(self) -> str:
        """A drawing of the layers and slots, as the text of an SVG file. Notebooks show it."""
        return _meristem.host_svg(self._setting, [])

    def _repr_svg_(self) -> str:
        return self.svg()

    def summary(self, input: Iterable[int] = (1, 28, 28), classes: int = 10) -> HostSummary:
        """The layers with their output shapes, parameters and multiplications.

        Args:
            input: Channels, rows and columns of an image (the embedded images have 1×28×28),
                channels and points of a signal, or the features of a vector.
            classes: Classes of the dataset.

        Raises:
            SettingError: There is no such host, or it does not fit the samples.
        """
        expected = "channels, rows and columns; channels and points; or features"
        sizes = sequence("input", input, expected, SettingError)
        if not 1 <= len(sizes) <= 3:
            raise refused("input", input, expected, SettingError)
        image = [integer("input", size, 1, error=SettingError) for size in sizes]
        if len(image) < 3:
            # A signal is an image of one row, a vector one of one pixel.
            image = [image[0], 1, *(image[1:] or [1])]
        number = integer("classes", classes, 1, error=SettingError)
        found = _meristem.host_summary(self._setting, image, number)
        layers = [LayerSummary(**{**row, "output": tuple(row["output"])}) for row in found["layers"]]
        return HostSummary(**{**found, "input": tuple(found["input"]), "layers": layers})
