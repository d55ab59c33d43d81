"""Layers of hosts for operations of PyTorch on one tensor: modules, functions and methods. Requires
``torch``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import nn as layers
from .network import EPS
from .nn import Layer

#: Momentum of the running statistics of batch norm.
MOMENTUM = 0.1


@dataclass
class Call:
    """A use of an operation: its settings, and the shape of its tensor."""

    settings: Mapping[str, Any]
    shape: tuple[int, ...]
    #: Whether the tensor is a vector for hosts, also if it is an image of one pixel for PyTorch.
    vector: bool
    #: The first unsupported part: what it is, and the expected value.
    problem: tuple[str, str] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def refuse(self, got: str, expected: str) -> None:
        """Notes an unsupported part."""
        self.problem = self.problem or (got, expected)

    def only(self, **allowed: Any) -> None:
        """Checks that settings have the values that layers have."""
        for name, value in allowed.items():
            given = self[name]
            if type(given) is not type(value) and isinstance(value, bool | None) or given != value:
                self.refuse(f"{name}={short(given)}", f"{name}={value!r}")

    def rank(self, rank: int) -> None:
        """Checks that the tensor is an image (4) or a vector (2)."""
        if rank == 4 and self.vector:
            self.refuse("a pooled image", "an image; the layers after a global pool get a vector")
        if len(self.shape) != rank:
            kind = "images (N, C, H, W)" if rank == 4 else "vectors (N, F)"
            self.refuse(f"a tensor of shape {self.shape}", kind)


@dataclass(frozen=True)
class Operation:
    """The layer of an operation, and its settings with defaults, in the order of its arguments."""

    #: Makes the layer; ``None`` for the identity.
    layer: Callable[[Call], Layer | None]
    settings: Mapping[str, Any] = field(default_factory=dict)


def pair(value: Any) -> tuple[int, int]:
    """Sizes along rows and columns."""
    if isinstance(value, tuple | list):
        rows, columns = value if len(value) == 2 else (value[0], value[0])
        return rows, columns
    return value, value


def size(value: Any) -> layers.Size:
    """One number if both sizes are equal."""
    rows, columns = pair(value)
    return rows if rows == columns else (rows, columns)


def conv2d(call: Call) -> Layer:
    """A convolution."""
    call.rank(4)
    call.only(padding_mode="zeros")
    kernel, dilation = pair(call["kernel_size"]), pair(call["dilation"])
    reach = [apart * (k - 1) for k, apart in zip(kernel, dilation, strict=True)]
    padding = call["padding"]
    if padding == "same":
        if any(each % 2 for each in reach):
            got = f"padding='same' of a {kernel[0]}×{kernel[1]} kernel"
            call.refuse(got, "an odd kernel, whose padding has equal sides")
        padding = [each // 2 for each in reach]
    around = (0, 0) if padding == "valid" else pair(padding)
    odd = all(k % 2 for k in kernel)
    same = odd and list(around) == [each // 2 for each in reach]
    return layers.Conv2d(
        call["out_channels"],
        size(kernel),
        size(call["stride"]),
        "same" if same else "valid" if around == (0, 0) else size(around),
        call["groups"],
        call["bias"] is not None,
        size(dilation),
    )


def linear(call: Call) -> Layer:
    """A linear layer."""
    call.rank(2)
    return layers.Linear(call["out_features"], call["bias"] is not None)


def batch_norm(rank: int) -> Operation:
    """Batch norm of tensors of a rank."""

    def layer(call: Call) -> Layer:
        if len(call.shape) != rank:
            call.rank(rank)
        call.only(eps=EPS, momentum=MOMENTUM, affine=True, track_running_stats=True)
        return layers.BatchNorm()

    names = ("eps", "momentum", "affine", "track_running_stats")
    return Operation(layer, dict.fromkeys(names))


def group_norm(call: Call) -> Layer:
    """Group norm."""
    call.only(eps=EPS, affine=True)
    if len(call.shape) not in (2, 4):
        call.rank(4)
    return layers.GroupNorm(call["num_groups"])


def activation(make: Callable[[], Layer], settings: Mapping[str, Any]) -> Operation:
    """A function of one element, which hosts have with the defaults of its settings."""

    def layer(call: Call) -> Layer:
        # The result does not depend on `inplace`. If a later operation reads the overwritten input,
        # the comparison of the logits finds it.
        call.only(**{name: value for name, value in settings.items() if name != "inplace"})
        return make()

    return Operation(layer, settings)


def leaky_relu(call: Call) -> Layer:
    """Leaky ReLU."""
    return layers.LeakyReLU(float(call["negative_slope"]))


def gelu(call: Call) -> Layer:
    """GELU, exact or by tanh."""
    if call["approximate"] == "tanh":
        return layers.GELUTanh()
    call.only(approximate="none")
    return layers.GELU()


def dropout(call: Call) -> Layer | None:
    """Dropout of single elements; the identity in evaluation mode or with p = 0."""
    if not call["training"] or call["p"] == 0:
        return None
    if not 0 <= call["p"] < 1:
        call.refuse(f"p={short(call['p'])}", "a number from 0 to below 1")
    return layers.Dropout(float(call["p"]))


def max_pool2d(call: Call) -> Layer:
    """Max pooling."""
    call.rank(4)
    if pair(call["dilation"]) != (1, 1):
        call.refuse(f"dilation={short(call['dilation'])}", "dilation=1")
    call.only(ceil_mode=False, return_indices=False)
    return layers.MaxPool2d(*_window(call))


def avg_pool2d(call: Call) -> Layer:
    """Average pooling."""
    call.rank(4)
    call.only(ceil_mode=False, divisor_override=None)
    kernel, stride, padding = _window(call)
    if padding != 0:
        call.only(count_include_pad=True)
    return layers.AvgPool2d(kernel, stride, padding)


def _window(call: Call) -> tuple[layers.Size, layers.Size | None, layers.Size]:
    """Kernel, stride and padding of a pool."""
    kernel = pair(call["kernel_size"])
    given = call["stride"]
    stride = kernel if given is None or given == () else pair(given)
    return size(kernel), None if stride == kernel else size(stride), size(call["padding"])


def adaptive(whole: type[Layer], window: Callable[[layers.Size], Layer]) -> Operation:
    """A pool to a given size: of the whole image, or of windows that divide it."""

    def layer(call: Call) -> Layer | None:
        call.rank(4)
        call.only(**{name: False for name in call.settings if name == "return_indices"})
        if call.problem:
            return None
        image = call.shape[2:]
        wanted = pair(call["output_size"])
        out = tuple(side if n is None else n for n, side in zip(wanted, image, strict=True))
        if out == (1, 1):
            return whole()
        if out == image:
            return None
        if any(side % n for n, side in zip(out, image, strict=True)):
            got = f"{image[0]}×{image[1]} pixels to {out[0]}×{out[1]}"
            call.refuse(got, "an output size that divides the image's")
        return window(size(tuple(side // n for n, side in zip(out, image, strict=True))))

    return Operation(layer, {"output_size": None})


def reduction(whole: type[Layer], settings: Mapping[str, Any]) -> Operation:
    """A mean or maximum over the pixels."""

    def layer(call: Call) -> Layer:
        call.rank(4)
        dim = call["dim"]
        axes = dim if isinstance(dim, tuple | list) else (dim,)
        if not all(isinstance(axis, int) for axis in axes) or {a % 4 for a in axes} != {2, 3}:
            call.refuse(f"dim={short(dim)}", "dim=(2, 3)")
        call.only(**{name: None for name in settings if name == "dtype"})
        return whole()

    return Operation(layer, settings)


def max_pool2d_with_indices(call: Call) -> Layer | None:
    """Max pooling whose function returns the places of the maxima as well."""
    call.refuse("return_indices=True", "return_indices=False")
    return None


IN_PLACE = {"inplace": False}
RELU = activation(layers.ReLU, IN_PLACE)
SIGMOID = activation(layers.Sigmoid, {})
TANH = activation(layers.Tanh, {})
ELU = activation(layers.ELU, {"alpha": 1.0, **IN_PLACE})
LEAKY_RELU = Operation(leaky_relu, {"negative_slope": 0.01, **IN_PLACE})
GELU = Operation(gelu, {"approximate": "none"})
SILU = activation(layers.SiLU, IN_PLACE)
SOFTPLUS = activation(layers.Softplus, {"beta": 1, "threshold": 20})
HARD_SWISH = activation(layers.HardSwish, IN_PLACE)
DROPOUT = Operation(dropout, {"p": 0.5, "training": True, **IN_PLACE})
MAX_POOL = Operation(
    max_pool2d,
    {
        "kernel_size": None,
        "stride": None,
        "padding": 0,
        "dilation": 1,
        "ceil_mode": False,
        "return_indices": False,
    },
)
INDICES = Operation(max_pool2d_with_indices, MAX_POOL.settings)
AVG_POOL = Operation(
    avg_pool2d,
    {
        "kernel_size": None,
        "stride": None,
        "padding": 0,
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": None,
    },
)
AVG_TO_SIZE = adaptive(layers.GlobalAvgPool, layers.AvgPool2d)
MAX_TO_SIZE = adaptive(layers.GlobalMaxPool, layers.MaxPool2d)
MAX_TO_SIZE = Operation(MAX_TO_SIZE.layer, {**MAX_TO_SIZE.settings, "return_indices": False})
MEAN = reduction(layers.GlobalAvgPool, {"dim": None, "keepdim": False, "dtype": None})
AMAX = reduction(layers.GlobalMaxPool, {"dim": None, "keepdim": False})
CONVOLUTION = (
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "bias",
    "padding_mode",
)

MODULES: dict[type[nn.Module], Operation] = {
    nn.Conv2d: Operation(conv2d, dict.fromkeys(CONVOLUTION)),
    nn.Linear: Operation(linear, dict.fromkeys(("out_features", "bias"))),
    nn.BatchNorm2d: batch_norm(4),
    nn.BatchNorm1d: batch_norm(2),
    nn.GroupNorm: Operation(group_norm, dict.fromkeys(("num_groups", "eps", "affine"))),
    nn.ReLU: RELU,
    nn.Sigmoid: SIGMOID,
    nn.Tanh: TANH,
    nn.ELU: ELU,
    nn.LeakyReLU: LEAKY_RELU,
    nn.GELU: GELU,
    nn.SiLU: SILU,
    nn.Softplus: SOFTPLUS,
    nn.Hardswish: HARD_SWISH,
    nn.Dropout: DROPOUT,
    nn.MaxPool2d: MAX_POOL,
    nn.AvgPool2d: AVG_POOL,
    nn.AdaptiveAvgPool2d: AVG_TO_SIZE,
    nn.AdaptiveMaxPool2d: MAX_TO_SIZE,
}
FUNCTIONS: dict[Any, Operation] = {
    functional.relu: RELU,
    torch.relu: RELU,
    torch.relu_: RELU,
    functional.sigmoid: SIGMOID,
    torch.sigmoid: SIGMOID,
    functional.tanh: TANH,
    torch.tanh: TANH,
    functional.elu: ELU,
    functional.leaky_relu: LEAKY_RELU,
    functional.gelu: GELU,
    functional.silu: SILU,
    functional.softplus: SOFTPLUS,
    functional.hardswish: HARD_SWISH,
    functional.dropout: DROPOUT,
    functional.max_pool2d: MAX_POOL,
    torch.max_pool2d: MAX_POOL,
    functional.max_pool2d_with_indices: INDICES,
    functional.avg_pool2d: AVG_POOL,
    functional.adaptive_avg_pool2d: AVG_TO_SIZE,
    functional.adaptive_max_pool2d: MAX_TO_SIZE,
    torch.mean: MEAN,
    torch.amax: AMAX,
}
METHODS: dict[str, Operation] = {
    "relu": RELU,
    "relu_": RELU,
    "sigmoid": SIGMOID,
    "sigmoid_": SIGMOID,
    "tanh": TANH,
    "tanh_": TANH,
    "mean": MEAN,
    "amax": AMAX,
}
