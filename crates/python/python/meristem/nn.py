"""Layers of hosts.

``Host(Conv2d(16, 3), BatchNorm(), ReLU(), Slot("stem"), GlobalAvgPool(), Linear())`` describes a host.
A layer without a name is named after its position, such as ``layers.3``; as in PyTorch, the name is
the prefix of its tensors. `docs/hosts.md` describes the layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .errors import SettingError

#: A size along rows and columns: one number for both, or ``(rows, columns)``.
Size = int | Sequence[int]


class Layer:
    """A layer of a host."""

    #: Kind of the layer in descriptions, such as ``conv2d``.
    kind: ClassVar[str]

    def entry(self) -> Any:
        """The layer as descriptions in JSON have it."""
        keys = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None and value != field.default:
                keys[field.name] = list(value) if isinstance(value, tuple) else value
        return {self.kind: keys} if keys else self.kind


@dataclass
class Conv2d(Layer):
    """Convolution with PyTorch's weights and initial values."""

    kind: ClassVar[str] = "conv2d"
    #: Output channels.
    out: int
    kernel: Size
    stride: Size = 1
    #: ``"same"``, ``"valid"``, or zeros on each side.
    padding: str | Size = "same"
    #: Groups of channels that are convolved separately.
    groups: int = 1
    bias: bool = False
    dilation: Size = 1
    name: str | None = None


@dataclass
class Conv1d(Layer):
    """Convolution of a signal, with PyTorch's weights and initial values."""

    kind: ClassVar[str] = "conv1d"
    #: Output channels.
    out: int
    #: Points of a window.
    kernel: int
    stride: int = 1
    #: ``"same"``, ``"valid"``, or zeros before and after the signal.
    padding: str | int = "same"
    #: Groups of channels that are convolved separately.
    groups: int = 1
    bias: bool = False
    dilation: int = 1
    name: str | None = None


@dataclass
class BatchNorm(Layer):
    """Batch norm."""

    kind: ClassVar[str] = "batch_norm"
    name: str | None = None


@dataclass
class GroupNorm(Layer):
    """Group norm."""

    kind: ClassVar[str] = "group_norm"
    groups: int
    name: str | None = None


@dataclass
class LayerNorm(Layer):
    """Layer norm over the channels of each pixel, or the features of a vector."""

    kind: ClassVar[str] = "layer_norm"
    name: str | None = None


@dataclass
class RMSNorm(Layer):
    """RMS norm over the channels of each pixel, or the features of a vector."""

    kind: ClassVar[str] = "rms_norm"
    name: str | None = None


@dataclass
class ReLU(Layer):
    """``max(x, 0)``."""

    kind: ClassVar[str] = "relu"


@dataclass
class Sigmoid(Layer):
    """The logistic function."""

    kind: ClassVar[str] = "sigmoid"


@dataclass
class Tanh(Layer):
    """The hyperbolic tangent."""

    kind: ClassVar[str] = "tanh"


@dataclass
class LeakyReLU(Layer):
    """``x`` above 0, ``slope * x`` elsewhere."""

    kind: ClassVar[str] = "leaky_relu"
    slope: float = 0.01


@dataclass
class ELU(Layer):
    """``x`` above 0, ``exp(x) - 1`` elsewhere."""

    kind: ClassVar[str] = "elu"


@dataclass
class GELU(Layer):
    """``x`` times the normal distribution function of ``x``."""

    kind: ClassVar[str] = "gelu"


@dataclass
class GELUTanh(Layer):
    """The approximation of :class:`GELU` by tanh."""

    kind: ClassVar[str] = "gelu_tanh"


@dataclass
class SiLU(Layer):
    """``x`` times the logistic function of ``x``."""

    kind: ClassVar[str] = "silu"


@dataclass
class Softplus(Layer):
    """``log(1 + exp(x))``."""

    kind: ClassVar[str] = "softplus"


@dataclass
class HardSwish(Layer):
    """``x * clip(x + 3, 0, 6) / 6``."""

    kind: ClassVar[str] = "hard_swish"


@dataclass
class Dropout(Layer):
    """In training each element becomes 0 with probability ``p``, or else is divided by ``1 - p``; the
    identity in evaluation. The draws depend on the name."""

    kind: ClassVar[str] = "dropout"
    p: float
    name: str | None = None


@dataclass
class MaxPool2d(Layer):
    """The maximum of each window; ``stride`` is the window's size unless given."""

    kind: ClassVar[str] = "max_pool2d"
    kernel: Size
    stride: Size | None = None
    padding: Size = 0
    name: str | None = None


@dataclass
class AvgPool2d(Layer):
    """The mean of each window, with zeros around the image; ``stride`` is the window's size unless
    given."""

    kind: ClassVar[str] = "avg_pool2d"
    kernel: Size
    stride: Size | None = None
    padding: Size = 0
    name: str | None = None


@dataclass
class MaxPool1d(Layer):
    """The maximum of each window of a signal; ``stride`` is the window's size unless given."""

    kind: ClassVar[str] = "max_pool1d"
    kernel: int
    stride: int | None = None
    padding: int = 0
    name: str | None = None


@dataclass
class AvgPool1d(Layer):
    """The mean of each window of a signal, with zeros around it; ``stride`` is the window's size
    unless given."""

    kind: ClassVar[str] = "avg_pool1d"
    kernel: int
    stride: int | None = None
    padding: int = 0
    name: str | None = None


@dataclass
class GlobalAvgPool(Layer):
    """The mean over the image; later layers get a vector."""

    kind: ClassVar[str] = "global_avg_pool"


@dataclass
class GlobalMaxPool(Layer):
    """The maximum over the image; later layers get a vector."""

    kind: ClassVar[str] = "global_max_pool"


@dataclass
class Flatten(Layer):
    """The image as a vector, channel by channel, each row by row, as in PyTorch."""

    kind: ClassVar[str] = "flatten"


@dataclass
class Linear(Layer):
    """A linear layer over a vector."""

    kind: ClassVar[str] = "linear"
    #: Output features; ``"classes"`` for one output per class, label or number of the dataset.
    out: int | str = "classes"
    bias: bool = True
    name: str | None = None

    def entry(self) -> Any:
        """The layer as descriptions in JSON have it; ``out`` has no default there."""
        entry = super().entry()
        others = {} if isinstance(entry, str) else entry[self.kind]
        return {self.kind: {"out": self.out, **others}}


@dataclass
class Slot(Layer):
    """Place for a module."""

    kind: ClassVar[str] = "slot"
    name: str


@dataclass(init=False)
class Residual(Layer):
    """``body(x) + shortcut(x)``; a shortcut without layers is the identity."""

    kind: ClassVar[str] = "residual"
    body: list[Layer]
    shortcut: list[Layer]
    name: str | None

    def __init__(
        self, *body: Layer, shortcut: Iterable[Layer] = (), name: str | None = None
    ) -> None:
        self.body, self.shortcut, self.name = list(body), list(shortcut), name

    def entry(self) -> Any:
        """The layer as descriptions in JSON have it."""
        keys: dict[str, Any] = {"body": entries(self.body, "Residual")}
        if self.shortcut:
            keys["shortcut"] = entries(self.shortcut, "Residual")
        return {self.kind: keys | _named(self.name)}


@dataclass
class Save(Layer):
    """Saves its input for a later :class:`Join` or :class:`Load`."""

    kind: ClassVar[str] = "save"
    name: str


@dataclass
class Load(Layer):
    """A value that was saved before, in place of the input."""

    kind: ClassVar[str] = "load"
    name: str


@dataclass(init=False)
class Join(Layer):
    """The input joined with values that were saved before; ``join`` as for :class:`Branches`."""

    kind: ClassVar[str] = "join"
    names: list[str]
    join: str

    def __init__(self, *names: str, join: str) -> None:
        self.names, self.join = list(names), join

    def entry(self) -> Any:
        """The layer as descriptions in JSON have it."""
        return {self.kind: {"join": self.join, "from": self.names}}


@dataclass(init=False)
class Branches(Layer):
    """Branches that each get the input; ``join`` is ``"add"``, ``"multiply"`` or ``"concat"`` (along
    channels). A branch without layers is the identity. In a product a vector scales the channels of
    an image."""

    kind: ClassVar[str] = "branches"
    branches: list[list[Layer]]
    join: str
    name: str | None

    def __init__(self, *branches: Iterable[Layer], join: str, name: str | None = None) -> None:
        self.branches, self.join, self.name = [list(branch) for branch in branches], join, name

    def entry(self) -> Any:
        """The layer as descriptions in JSON have it."""
        branches = [entries(branch, "Branches") for branch in self.branches]
        return {self.kind: {"join": self.join, "branches": branches} | _named(self.name)}


def _named(name: str | None) -> dict[str, str]:
    return {} if name is None else {"name": name}


KINDS: dict[str, type[Layer]] = {
    layer.kind: layer
    for layer in (
        Conv2d,
        Conv1d,
        BatchNorm,
        GroupNorm,
        LayerNorm,
        RMSNorm,
        ReLU,
        Sigmoid,
        Tanh,
        LeakyReLU,
        ELU,
        GELU,
        GELUTanh,
        SiLU,
        Softplus,
        HardSwish,
        Dropout,
        MaxPool2d,
        AvgPool2d,
        MaxPool1d,
        AvgPool1d,
        GlobalAvgPool,
        GlobalMaxPool,
        Flatten,
        Linear,
        Slot,
        Residual,
        Branches,
        Save,
        Load,
        Join,
    )
}


def entries(layers: Iterable[Layer], owner: str) -> list[Any]:
    """The layers as descriptions in JSON have them.

    Raises:
        SettingError: An item is no layer.
    """
    found = []
    for number, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            message = f"layer {number} of {owner}: got {layer!r}, expected a layer of meristem.nn"
            raise SettingError(message, (), "give a layer such as `Conv2d(16, 3)`", 2)
        found.append(layer.entry())
    return found


def layer_of(entry: Any) -> Layer:
    """The layer of an entry in a complete description."""
    kind, keys = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    keys = dict(keys)
    if kind == "residual":
        body, shortcut = (layers_of(keys.pop(key, [])) for key in ("body", "shortcut"))
        return Residual(*body, shortcut=shortcut, **keys)
    if kind == "branches":
        return Branches(*map(layers_of, keys.pop("branches")), **keys)
    if kind == "join":
        return Join(*keys["from"], join=keys["join"])
    return KINDS[kind](**{key: _tuple(value) for key, value in keys.items()})


def layers_of(entries: Iterable[Any]) -> list[Layer]:
    """The layers of entries in a complete description."""
    return [layer_of(entry) for entry in entries]


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def description(layers: Iterable[Layer], name: str | None) -> Mapping[str, Any]:
    """A description of a host, without the names that follow from positions."""
    return {"version": 2} | _named(name) | {"layers": entries(layers, "Host")}
