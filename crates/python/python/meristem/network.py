"""The forward pass of the network in a weights file, for any array library.

The metadata of the file describes the layers of the host (``host``), and its modules and their
blueprints (``topology``). :func:`forward` applies them with the operations of a :class:`Library`.
:mod:`meristem.torch` implements these for PyTorch, and :class:`Numpy` as a simple reference.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from os import PathLike
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from . import _meristem
from .errors import WeightsError
from .weights import Weights, load

#: Stages in which a module is part of the network.
BLENDED = ("blending", "holding", "fossilized")
#: Stages in which a module with birth "joint" has alpha 1, whatever its move.
JOINT = ("training", "blending", "holding")
#: Supported versions of the entries of the metadata.
VERSIONS = {"topology": (1,), "host": (1, 2)}
#: ε of all norms.
EPS = 1e-5
#: Layers that are a function of one element: methods of a :class:`Library` without settings.
FUNCTIONS = (
    "relu",
    "sigmoid",
    "tanh",
    "elu",
    "gelu",
    "gelu_tanh",
    "silu",
    "softplus",
    "hard_swish",
)


#: Sizes along the axis of rows, for layers of signals, which are images of one row.
OF_ROW = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
#: One number for height and width, or one for each.
Size = int | Sequence[int]


def pair(of: Size) -> tuple[int, int]:
    """Height and width."""
    if isinstance(of, int):
        return of, of
    height, width = of
    return height, width


class Library(Protocol):
    """Tensors by name, and operations on arrays (N, C, H, W), or (N, C) after `mean`, `max` and
    `flatten`. A pooling's stride is its window's size unless given."""

    def tensor(self, name: str) -> Any: ...
    def conv2d(
        self,
        x: Any,
        weight: Any,
        padding: Size,
        groups: int,
        *,
        bias: Any = None,
        stride: Size = 1,
        dilation: Size = 1,
    ) -> Any: ...
    def batch_norm(self, x: Any, name: str) -> Any: ...
    def group_norm(self, x: Any, groups: int, weight: Any, bias: Any) -> Any: ...
    def layer_norm(self, x: Any, weight: Any, bias: Any) -> Any: ...
    def rms_norm(self, x: Any, weight: Any) -> Any: ...
    def linear(self, x: Any, weight: Any, bias: Any) -> Any: ...
    def max_pool2d(
        self, x: Any, size: Size, stride: Size | None = None, padding: Size = 0
    ) -> Any: ...
    def avg_pool2d(
        self, x: Any, size: Size, stride: Size | None = None, padding: Size = 0
    ) -> Any: ...
    def mean(self, x: Any) -> Any: ...
    def max(self, x: Any) -> Any: ...
    def flatten(self, x: Any) -> Any: ...
    def concat(self, parts: Sequence[Any]) -> Any: ...
    def multiply(self, a: Any, b: Any) -> Any: ...
    def relu(self, x: Any) -> Any: ...
    def sigmoid(self, x: Any) -> Any: ...
    def tanh(self, x: Any) -> Any: ...
    def leaky_relu(self, x: Any, slope: float) -> Any: ...
    def elu(self, x: Any) -> Any: ...
    def gelu(self, x: Any) -> Any: ...
    def gelu_tanh(self, x: Any) -> Any: ...
    def silu(self, x: Any) -> Any: ...
    def softplus(self, x: Any) -> Any: ...
    def hard_swish(self, x: Any) -> Any: ...
    def dropout(self, x: Any, p: float) -> Any: ...


def group_norm_groups(channels: int) -> int:
    """Number of groups of a group norm: the largest divisor of ``channels`` among 32, 16, 8, 4, 2, 1
    that leaves at least 16 channels per group, or else the largest divisor among them."""
    dividing = [g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0]
    return next((g for g in dividing if channels // g >= 16), dividing[0])


def forward(
    library: Library, host: Mapping[str, Any], topology: Mapping[str, Any], x: Any
) -> Any:
    """The logits (N, classes) of normalised images (N, C, H, W)."""
    blueprints = {blueprint["name"]: blueprint for blueprint in topology["blueprints"]}
    slots = {slot["slot"]: slot for slot in topology["slots"]}

    def grown(name: str, x: Any) -> Any:
        slot = slots.get(name, {})
        module = slot.get("module") or {}
        joint = module.get("birth") == "joint" and slot["stage"] in JOINT
        if slot.get("stage") not in BLENDED and not joint:
            return x
        if joint and not module["pruning"]:
            module = {**module, "alpha": {"alpha": 1.0}}
        return blend(library, f"slots.{name}", module, blueprints[module["blueprint"]], x)

    return host_layers(library, host["layers"], grown, {}, x)


def host_layers(
    library: Library,
    layers: Iterable[Any],
    grown: Callable[[str, Any], Any],
    saved: dict[str, Any],
    x: Any,
) -> Any:
    """The output of layers of a host; ``grown`` applies the module of a slot, ``saved`` has the saved
    values by name."""
    for layer in layers:
        match layer:
            case {"slot": {"name": name}}:
                x = grown(name, x)
            case {"conv2d": about}:
                x = conv2d(library, about, x)
            case {"conv1d": about}:
                x = conv2d(library, of_image(about), x)
            case {"batch_norm": {"name": name}}:
                x = library.batch_norm(x, name)
            case {"group_norm": {"name": name, "groups": groups}}:
                weight, bias = (library.tensor(f"{name}.{w}") for w in ("weight", "bias"))
                x = library.group_norm(x, groups, weight, bias)
            case {"layer_norm": {"name": name}}:
                weight, bias = (library.tensor(f"{name}.{w}") for w in ("weight", "bias"))
                x = library.layer_norm(x, weight, bias)
            case {"rms_norm": {"name": name}}:
                x = library.rms_norm(x, library.tensor(f"{name}.weight"))
            case str() if layer in FUNCTIONS:
                x = getattr(library, layer)(x)
            case {"leaky_relu": about}:
                x = library.leaky_relu(x, about["slope"])
            case {"dropout": {"p": p}}:
                x = library.dropout(x, p)
            case {"max_pool2d": about}:
                x = library.max_pool2d(x, *window(about))
            case {"max_pool1d": about}:
                x = library.max_pool2d(x, *window(of_image(about)))
            case {"avg_pool2d": about}:
                x = library.avg_pool2d(x, *window(about))
            case {"avg_pool1d": about}:
                x = library.avg_pool2d(x, *window(of_image(about)))
            case "global_avg_pool":
                x = library.mean(x)
            case "global_max_pool":
                x = library.max(x)
            case "flatten":
                x = library.flatten(x)
            case {"save": {"name": name}}:
                saved[name] = x
            case {"join": {"join": how, "from": names}}:
                x = join(library, how, [x, *(saved[name] for name in names)])
            case {"linear": about}:
                name = about["name"]
                bias = library.tensor(f"{name}.bias") if about.get("bias", True) else None
                x = library.linear(x, library.tensor(f"{name}.weight"), bias)
            case {"residual": about}:
                branches = [about["body"], about.get("shortcut", [])]
                body, shortcut = (host_layers(library, b, grown, saved, x) for b in branches)
                x = body + shortcut
            case {"branches": {"join": how, "branches": branches}}:
                ends = [host_layers(library, branch, grown, saved, x) for branch in branches]
                x = join(library, how, ends)
            case other:
                raise WeightsError(f"unknown layer of a host `{other}`")
    return x


def join(library: Library, how: str, values: Sequence[Any]) -> Any:
    """Values joined from first to last."""
    match how:
        case "add":
            return sum(values[1:], values[0])
        case "multiply":
            return reduce(library.multiply, values)
        case "concat":
            return library.concat(values)
        case other:
            raise WeightsError(f"unknown join `{other}`")


def of_image(about: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of signals as one of images of one row."""
    sizes = {key: (row, about[key]) for key, row in OF_ROW.items() if isinstance(about.get(key), int)}
    return {**about, **sizes}


def window(about: Mapping[str, Any]) -> tuple[Size, Size | None, Size]:
    """Kernel, stride and padding of a pool."""
    return about["kernel"], about.get("stride"), about.get("padding", 0)


def conv2d(library: Library, about: Mapping[str, Any], x: Any) -> Any:
    """The output of a convolution of a host."""
    name, kernel = about["name"], pair(about["kernel"])
    dilation = about.get("dilation", 1)
    match about.get("padding", "same"):
        case "same":
            padding: Size = [apart * (k // 2) for k, apart in zip(kernel, pair(dilation), strict=True)]
        case "valid":
            padding = 0
        case size:
            padding = size
    weight = library.tensor(f"{name}.weight")
    return library.conv2d(
        x,
        # In a signal the kernel has one row.
        weight if weight.ndim == 4 else weight[:, :, None],
        padding,
        about.get("groups", 1),
        bias=library.tensor(f"{name}.bias") if about.get("bias") else None,
        stride=about.get("stride", 1),
        dilation=dilation,
    )


def blend(
    library: Library, name: str, module: Mapping[str, Any], blueprint: Mapping[str, Any], x: Any
) -> Any:
    """Mixes a module into the host's activation `x`."""
    alpha, output = module["alpha"]["alpha"], grow(library, name, blueprint, x)
    match module["style"]:
        case "linear_add" | "sigmoid_add":
            return x + alpha * (output - x)
        case "linear_multiply":
            return x * (1 + alpha * library.tanh(output - x))
        case "linear_gate":
            gate = library.mean(x)
            for layer in (0, 2):
                weight, bias = (
                    library.tensor(f"{name}.gate.{layer}.{w}") for w in ("weight", "bias")
                )
                gate = library.linear(gate, weight, bias)
                gate = library.relu(gate) if layer == 0 else library.sigmoid(gate)
            return x + alpha * gate[:, :, None, None] * (output - x)
        case other:
            raise WeightsError(f"unknown blending style `{other}`")


def grow(library: Library, name: str, blueprint: Mapping[str, Any], x: Any) -> Any:
    """The output of a module for `x`."""
    y = x
    for i, layer in enumerate(blueprint["layers"]):
        y = apply(library, f"{name}.layers.{i}", layer, y)
    match blueprint["join"]:
        case "residual":
            return x + y
        case "tanh_mix":
            return x + library.tanh(library.tensor(f"{name}.mix")) * (y - x)
        case {"channel_scale": {"factor": factor}}:
            return x * (factor * y)[:, :, None, None]
        case other:
            raise WeightsError(f"unknown join `{other}`")


def apply(library: Library, name: str, layer: Any, x: Any) -> Any:
    """The output of a layer of a module."""
    match layer:
        case str() if layer in FUNCTIONS:
            return getattr(library, layer)(x)
        case {"leaky_relu": about}:
            return library.leaky_relu(x, about["slope"])
        case "global_avg_pool":
            return library.mean(x)
        case {"conv": about}:
            groups = x.shape[1] if about["depthwise"] else 1
            weight = library.tensor(f"{name}.weight")
            # In a signal the kernel has one row.
            rows, columns = weight.shape[2:]
            return library.conv2d(x, weight, (rows // 2, columns // 2), groups)
        case {"group_norm": _}:
            weight, bias = (library.tensor(f"{name}.{w}") for w in ("weight", "bias"))
            return library.group_norm(x, group_norm_groups(x.shape[1]), weight, bias)
        case {"linear": about}:
            bias = library.tensor(f"{name}.bias") if about["bias"] else None
            return library.linear(x, library.tensor(f"{name}.weight"), bias)
        case other:
            raise WeightsError(f"unknown layer `{other}`")


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


def _padded(x: Any, padding: Size, value: float) -> Any:
    """The image with rows and columns of a value around it."""
    (rows, columns), none = pair(padding), (0, 0)
    around = (none, none, (rows, rows), (columns, columns))
    return np.pad(x, around, constant_values=value)


def _channels(values: Any, x: Any) -> Any:
    """One value per channel, for an image (N, C, H, W) or a vector (N, C)."""
    return values.reshape(-1, *(1 for _ in x.shape[2:]))


def windows(x: Any, size: Size, stride: Size, dilation: Size = 1) -> Any:
    """The windows (N, C, rows, columns, height, width) of an image."""
    (h, w), (down, right), (dy, dx) = pair(size), pair(stride), pair(dilation)
    span = ((h - 1) * dy + 1, (w - 1) * dx + 1)
    seen = np.lib.stride_tricks.sliding_window_view(x, span, (2, 3))
    return seen[:, :, ::down, ::right, ::dy, ::dx]


class Numpy:
    """The operations in numpy, in float64. Slow, for reference."""

    def __init__(self, tensors: Mapping[str, "npt.NDArray[Any]"]) -> None:
        self.tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}

    def tensor(self, name: str) -> Any:
        return self.tensors[name]

    def conv2d(
        self,
        x: Any,
        weight: Any,
        padding: Size,
        groups: int,
        *,
        bias: Any = None,
        stride: Size = 1,
        dilation: Size = 1,
    ) -> Any:
        seen = windows(_padded(x, padding, 0.0), weight.shape[2:], stride, dilation)
        n, c, h, w = seen.shape[:4]
        seen = seen.reshape(n, groups, c // groups, h, w, *weight.shape[2:])
        weight = weight.reshape(groups, -1, *weight.shape[1:])
        out = np.einsum("ngchwij,gocij->ngohw", seen, weight, optimize=True)
        out = out.reshape(n, -1, h, w)
        return out if bias is None else out + bias[:, None, None]

    def batch_norm(self, x: Any, name: str) -> Any:
        names = ("running_mean", "running_var", "weight", "bias")
        mean, var, weight, bias = (_channels(self.tensors[f"{name}.{w}"], x) for w in names)
        return (x - mean) / np.sqrt(var + EPS) * weight + bias

    def group_norm(self, x: Any, groups: int, weight: Any, bias: Any) -> Any:
        grouped = x.reshape(len(x), groups, -1)
        mean, var = (f(grouped, axis=2, keepdims=True) for f in (np.mean, np.var))
        normal = ((grouped - mean) / np.sqrt(var + EPS)).reshape(x.shape)
        return normal * _channels(weight, x) + _channels(bias, x)

    def layer_norm(self, x: Any, weight: Any, bias: Any) -> Any:
        mean, var = (f(x, axis=1, keepdims=True) for f in (np.mean, np.var))
        weight, bias = (w.reshape(-1, *[1] * (x.ndim - 2)) for w in (weight, bias))
        return (x - mean) / np.sqrt(var + EPS) * weight + bias

    def rms_norm(self, x: Any, weight: Any) -> Any:
        square = np.mean(x * x, axis=1, keepdims=True)
        return x / np.sqrt(square + EPS) * weight.reshape(-1, *[1] * (x.ndim - 2))

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        return x @ weight.T + (0 if bias is None else bias)

    def max_pool2d(
        self, x: Any, size: Size, stride: Size | None = None, padding: Size = 0
    ) -> Any:
        stride = size if stride is None else stride
        return windows(_padded(x, padding, -np.inf), size, stride).max((4, 5))

    def avg_pool2d(
        self, x: Any, size: Size, stride: Size | None = None, padding: Size = 0
    ) -> Any:
        stride = size if stride is None else stride
        return windows(_padded(x, padding, 0.0), size, stride).mean((4, 5))

    def mean(self, x: Any) -> Any:
        return x.mean((2, 3))

    def max(self, x: Any) -> Any:
        return x.max((2, 3))

    def flatten(self, x: Any) -> Any:
        return x.reshape(len(x), -1)

    def concat(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts, axis=1)

    def multiply(self, a: Any, b: Any) -> Any:
        return a * b

    def relu(self, x: Any) -> Any:
        return np.maximum(x, 0)

    def sigmoid(self, x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    def tanh(self, x: Any) -> Any:
        return np.tanh(x)

    def leaky_relu(self, x: Any, slope: float) -> Any:
        return np.where(x > 0, x, slope * x)

    def elu(self, x: Any) -> Any:
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))

    def gelu(self, x: Any) -> Any:
        return 0.5 * x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))

    def gelu_tanh(self, x: Any) -> Any:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def silu(self, x: Any) -> Any:
        return x * self.sigmoid(x)

    def softplus(self, x: Any) -> Any:
        return np.logaddexp(x, 0)

    def hard_swish(self, x: Any) -> Any:
        return x * np.clip(x + 3, 0, 6) / 6

    def dropout(self, x: Any, p: float) -> Any:
        return x


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
