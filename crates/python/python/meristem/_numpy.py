"""The operations of networks in numpy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._forward import EPS, Size, pair


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
