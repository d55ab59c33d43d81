"""Hosts: the networks in which modules grow."""

from collections.abc import Iterable
from dataclasses import dataclass

from . import _meristem
from ._arguments import integer, refused, sequence, text
from .errors import SettingError


@dataclass(frozen=True)
class Layer:
    """A layer or slot of a host, for images of one shape."""

    #: Prefix of the tensor names, or name of the slot; ``None`` for a layer without a name.
    name: str | None
    #: Kind of the layer, with its kernel, such as ``conv 3×3``; ``slot`` for a slot.
    layer: str
    #: Channels, rows and columns of the output for one image.
    output: tuple[int, int, int]
    #: Trained parameters.
    parameters: int
    #: Multiply-accumulate operations per image.
    macs: int


@dataclass(frozen=True)
class HostSummary:
    """Sizes of a host without modules, for images of one shape. ``print`` shows a table."""

    #: Description of the host.
    host: str
    #: Channels, rows and columns of an image.
    input: tuple[int, int, int]
    #: Classes of the dataset.
    classes: int
    #: Layers in forward order.
    layers: list[Layer]
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
        lines = [self.host]
        for row in rows:
            left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join(left + right))
        return "\n".join(lines)


def _row(layer: Layer) -> tuple[str, ...]:
    sizes = (f"{n:,}" if n else "" for n in (layer.parameters, layer.macs))
    return (layer.name or "", layer.layer, "×".join(map(str, layer.output)), *sizes)


class Host:
    """A host without modules: a preset's name such as ``deep``, or a description such as
    ``cnn:channels=12,blocks=4,kernel=5,pools=3``.
    """

    def __init__(self, description: str) -> None:
        self._text = text("description", description, SettingError)

    def __repr__(self) -> str:
        return f"Host({self._text!r})"

    def summary(self, input: Iterable[int] = (1, 28, 28), classes: int = 10) -> HostSummary:
        """The layers with their output shapes, parameters and multiplications.

        Args:
            input: Channels, rows and columns of an image; the embedded images have 1×28×28.
            classes: Classes of the dataset.

        Raises:
            SettingError: There is no such host, or it does not fit the images.
        """
        expected = "channels, rows and columns"
        sizes = sequence("input", input, expected, SettingError)
        if len(sizes) != 3:
            raise refused("input", input, expected, SettingError)
        image = [integer("input", size, 1, error=SettingError) for size in sizes]
        number = integer("classes", classes, 1, error=SettingError)
        found = _meristem.host_summary(self._text, image, number)
        layers = [Layer(**{**row, "output": tuple(row["output"])}) for row in found["layers"]]
        return HostSummary(**{**found, "input": tuple(found["input"]), "layers": layers})
