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
from ._forward import EPS
from .nn import Layer

#: Momentum of the running statistics of batch norm.
MOMENTUM = 0.1
#: Tensors by rank.
SAMPLES = {2: "vectors (N, F)", 3: "signals (N, C, L)", 4: "images (N, C, H, W)"}


@dataclass
class Call:
    """A use of an operation: its settings, and the shape of its tensor."""

    settings: Mapping[str, Any]
    shape: tuple[int, ...]
    #: Whether the tensor is a vector for hosts. For PyTorch it may be an image of one pixel.
    vector: bool
    #: The first unsupported part: what it is, and the expected value.
    problem: tuple[str, str] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def refuse(self, got: str, expected: str) -> None:
        """Notes an unsupported part."""
        self.problem = self.problem or (got, expected)

    def only(self, **allowed: Any) -> None:
        """Checks that settings have the only values that layers support."""
        for name, value in allowed.items():
            given = self[name]
            if type(given) is not type(value) and isinstance(value, bool | None) or given != value:
                self.refuse(f"{name}={short(given)}", f"{name}={value!r}")

    def rank(self, rank: int, pooled: bool = False) -> None:
        """Checks that the tensor is an image (4), a signal (3) or a vector (2). ``pooled`` allows the
        one pixel that a global pool leaves."""
        if rank > 2 and self.vector and not pooled:
            kind, one = ("image", "an image") if rank == 4 else ("signal", "a signal")
            self.refuse(f"a pooled {kind}", f"{one}; the layers after a global pool get a vector")
        if len(self.shape) != rank:
            self.refuse(f"a tensor of shape {self.shape}", SAMPLES[rank])


@dataclass(frozen=True)
class Operation:
    """The layer of an operation, and its settings with defaults, in the order of its arguments."""

    #: Makes the layer; ``None`` for the identity.
    layer: Callable[[Call], Layer | None]
    settings: Mapping[str, Any] = field(default_factory=dict)


def sizes(value: Any, axes: int) -> tuple[int, ...]:
    """Sizes along rows and columns, or along the points of a signal."""
    if isinstance(value, tuple | list):
        return tuple(value) if len(value) == axes else (value[0],) * axes
    return (value,) * axes


def size(values: tuple[int, ...]) -> Any:
    """One number if all sizes are equal."""
    return values[0] if len(set(values)) == 1 else values


def convolution(make: type[layers.Conv2d] | type[layers.Conv1d]) -> Operation:
    """A convolution of images or signals."""
    axes = 2 if make is layers.Conv2d else 1

    def layer(call: Call) -> Layer:
        call.rank(axes + 2, pooled=True)
        call.only(padding_mode="zeros")
        kernel, dilation = sizes(call["kernel_size"], axes), sizes(call["dilation"], axes)
        reach = [apart * (k - 1) for k, apart in zip(kernel, dilation, strict=True)]
        padding = call["padding"]
        if padding == "same":
            if any(each % 2 for each in reach):
                got = f"padding='same' of a {'×'.join(map(str, kernel))} kernel"
                call.refuse(got, "an odd kernel, whose padding has equal sides")
            padding = [each // 2 for each in reach]
        around = (0,) * axes if padding == "valid" else sizes(padding, axes)
        odd = all(k % 2 for k in kernel)
        same = odd and list(around) == [each // 2 for each in reach]
        return make(
            call["out_channels"],
            size(kernel),
            size(sizes(call["stride"], axes)),
            "same" if same else size(around) if any(around) else "valid",
            call["groups"],
            call["bias"] is not None,
            size(dilation),
        )

    return Operation(layer, dict.fromkeys(CONVOLUTION))


def linear(call: Call) -> Layer:
    """A linear layer."""
    call.rank(2)
    return layers.Linear(call["out_features"], call["bias"] is not None)


def batch_norm(*ranks: int) -> Operation:
    """Batch norm of tensors of these ranks."""

    def layer(call: Call) -> Layer:
        if len(call.shape) not in ranks:
            call.rank(ranks[0])
        call.only(eps=EPS, momentum=MOMENTUM, affine=True, track_running_stats=True)
        return layers.BatchNorm()

    names = ("eps", "momentum", "affine", "track_running_stats")
    return Operation(layer, dict.fromkeys(names))


def group_norm(call: Call) -> Layer:
    """Group norm."""
    call.only(eps=EPS, affine=True)
    if len(call.shape) not in SAMPLES:
        call.rank(4)
    return layers.GroupNorm(call["num_groups"])


def activation(make: Callable[[], Layer], settings: Mapping[str, Any]) -> Operation:
    """An elementwise function, which hosts support only with the defaults of its settings."""

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


def pool(make: Callable[..., Layer], settings: Mapping[str, Any]) -> Operation:
    """A pool of windows of images or signals."""
    axes = 2 if make in (layers.MaxPool2d, layers.AvgPool2d) else 1

    def layer(call: Call) -> Layer:
        call.rank(axes + 2)
        expected = {"ceil_mode": False, "return_indices": False, "divisor_override": None}
        call.only(**{name: value for name, value in expected.items() if name in settings})
        if "dilation" in settings and set(sizes(call["dilation"], axes)) != {1}:
            call.refuse(f"dilation={short(call['dilation'])}", "dilation=1")
        kernel, given = sizes(call["kernel_size"], axes), call["stride"]
        stride = kernel if given is None or given == () else sizes(given, axes)
        padding = sizes(call["padding"], axes)
        if "count_include_pad" in settings and any(padding):
            call.only(count_include_pad=True)
        return make(size(kernel), None if stride == kernel else size(stride), size(padding))

    return Operation(layer, settings)


def adaptive(whole: type[Layer], window: Callable[..., Layer]) -> Operation:
    """A pool to a given size: of the whole image or signal, or of windows that divide it."""
    axes = 2 if window in (layers.MaxPool2d, layers.AvgPool2d) else 1
    kind = "image" if axes == 2 else "signal"

    def layer(call: Call) -> Layer | None:
        call.rank(axes + 2, pooled=True)
        call.only(**{name: False for name in call.settings if name == "return_indices"})
        if call.problem:
            return None
        sample = call.shape[2:]
        wanted: tuple[int | None, ...] = sizes(call["output_size"], axes)
        out = tuple(side if n is None else n for n, side in zip(wanted, sample, strict=True))
        if set(out) == {1}:
            return whole()
        if out == sample:
            return None
        if any(side % n for n, side in zip(out, sample, strict=True)):
            before, after = ("×".join(map(str, of)) for of in (sample, out))
            got = f"{before} {'pixels' if axes == 2 else 'points'} to {after}"
            call.refuse(got, f"an output size that divides the {kind}'s")
        return window(size(tuple(side // n for n, side in zip(out, sample, strict=True))))

    return Operation(layer, {"output_size": None})


def reduction(whole: type[Layer], settings: Mapping[str, Any]) -> Operation:
    """A mean or maximum over the pixels or points."""

    def layer(call: Call) -> Layer:
        rank = 3 if len(call.shape) == 3 else 4
        call.rank(rank, pooled=True)
        dim = call["dim"]
        axes = dim if isinstance(dim, tuple | list) else (dim,)
        wanted = set(range(2, rank))
        if not all(isinstance(axis, int) for axis in axes) or {a % rank for a in axes} != wanted:
            call.refuse(f"dim={short(dim)}", "dim=(2, 3)" if rank == 4 else "dim=2")
        call.only(**{name: None for name in settings if name == "dtype"})
        return whole()

    return Operation(layer, settings)


def with_indices(call: Call) -> Layer | None:
    """Max pooling whose function returns the places of the maxima as well."""
    call.refuse("return_indices=True", "return_indices=False")
    return None


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
MAX_SETTINGS = {
    "kernel_size": None,
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}
AVG_SETTINGS = {
    "kernel_size": None,
    "stride": None,
    "padding": 0,
    "ceil_mode": False,
    "count_include_pad": True,
}
MAX_POOL, MAX_POOL_1D = (pool(make, MAX_SETTINGS) for make in (layers.MaxPool2d, layers.MaxPool1d))
INDICES = Operation(with_indices, MAX_SETTINGS)
AVG_POOL = pool(layers.AvgPool2d, {**AVG_SETTINGS, "divisor_override": None})
AVG_POOL_1D = pool(layers.AvgPool1d, AVG_SETTINGS)
AVG_TO_SIZE = adaptive(layers.GlobalAvgPool, layers.AvgPool2d)
AVG_TO_SIZE_1D = adaptive(layers.GlobalAvgPool, layers.AvgPool1d)
MAX_TO_SIZE, MAX_TO_SIZE_1D = (
    Operation(adaptive(layers.GlobalMaxPool, make).layer, {"output_size": None, "return_indices": False})
    for make in (layers.MaxPool2d, layers.MaxPool1d)
)
MEAN = reduction(layers.GlobalAvgPool, {"dim": None, "keepdim": False, "dtype": None})
AMAX = reduction(layers.GlobalMaxPool, {"dim": None, "keepdim": False})

MODULES: dict[type[nn.Module], Operation] = {
    nn.Conv2d: convolution(layers.Conv2d),
    nn.Conv1d: convolution(layers.Conv1d),
    nn.Linear: Operation(linear, dict.fromkeys(("out_features", "bias"))),
    nn.BatchNorm2d: batch_norm(4),
    nn.BatchNorm1d: batch_norm(2, 3),
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
    nn.MaxPool1d: MAX_POOL_1D,
    nn.AvgPool1d: AVG_POOL_1D,
    nn.AdaptiveAvgPool1d: AVG_TO_SIZE_1D,
    nn.AdaptiveMaxPool1d: MAX_TO_SIZE_1D,
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
    functional.max_pool1d: MAX_POOL_1D,
    torch.max_pool1d: MAX_POOL_1D,
    functional.max_pool1d_with_indices: INDICES,
    functional.avg_pool1d: AVG_POOL_1D,
    functional.adaptive_avg_pool1d: AVG_TO_SIZE_1D,
    functional.adaptive_max_pool1d: MAX_TO_SIZE_1D,
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
