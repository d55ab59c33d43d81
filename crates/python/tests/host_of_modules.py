"""Small PyTorch modules, and their comparison with hosts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn

import meristem
import meristem.torch
from meristem.network import logits


class Fn(nn.Module):
    """A forward as a function of a module with parts, and the images."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def conv(inputs: int, out: int, kernel: int = 3, **keys: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, out, kernel, padding=kernel // 2, bias=False, **keys)


def images(count: int = 3, channels: int = 3, side: int = 32) -> Any:
    return torch.randn(count, channels, side, side)


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)


def warmed(module: nn.Module) -> nn.Module:
    """A module whose running statistics and norms differ from their initial values."""
    for part in module.modules():
        for name in ("running_mean", "running_var", "weight", "bias"):
            tensor = getattr(part, name, None)
            if isinstance(part, NORMS) and tensor is not None:
                tensor.data.uniform_(0.5, 1.5)
    return module


def compare(
    module: nn.Module, host: meristem.Host, weights: meristem.weights.Weights, x: Any
) -> None:
    """Logits by numpy in float64, and by PyTorch in float64, differ by rounding of the sums: some
    thousand products of about 1, with 1e-16 each. In float32 the same sums have 1e-7 each."""
    with torch.no_grad():
        wanted = module.eval().double()(x.double()).numpy()
        own = meristem.torch.load(weights)(x).numpy()
    scale = np.abs(wanted).max()
    assert np.abs(logits(weights, x.numpy()) - wanted).max() < 1e-12 * scale
    assert np.abs(own - wanted).max() < 1e-5 * scale
    assert meristem.Host(host.description) == host == meristem.Host(*host.layers)


def kinds(found: list[Any]) -> list[Any]:
    """The classes of layers, without those of branches."""
    return [type(layer) for layer in found]


def simple(forward: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    """A module whose function gets the output of a convolution, and returns images for a pool."""

    def whole(self: Any, x: Any) -> Any:
        return self.fc(forward(self, self.conv(x)).mean((2, 3)))

    return Fn(whole, conv=conv(3, 4), fc=nn.Linear(4, 5), **parts)
