"""Grown networks as PyTorch modules. Requires ``torch``."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .network import EPS, Size, forward, host_of, normalization, pair, read, topology_of
from .weights import Weights

#: Suffixes of tensors that are buffers, not parameters.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Network(nn.Module):
    """A grown network.

    Its ``state_dict`` has the names of the weights file. In training mode batch norm uses the
    statistics of the batch, and all modules train with their host, at constant alpha.
    """

    def __init__(self, weights: Weights) -> None:
        """Creates a network with copies of the weights."""
        super().__init__()
        self.host, self.topology = host_of(weights), topology_of(weights)
        #: Names of the classes.
        self.classes: list[str] = weights.metadata["classes"]
        #: Mean and standard deviation per channel, for pixels in 0..1.
        self.pixels = normalization(weights)
        # Owners of the tensors by name. A layer may have any name, also one of an attribute of a
        # module, such as `type`; `add_module` would refuse it.
        self._owners: dict[str, nn.Module] = {}
        for name, array in weights.tensors.items():
            *path, last = name.split(".")
            at: nn.Module = self
            for part in path:
                at = at._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            # A dict, because an attribute would be a child module.
            self._owners[".".join(path)] = at
            tensor = torch.from_numpy(array.copy())
            if last in BUFFERS:
                at.register_buffer(last, tensor)
            else:
                at.register_parameter(last, nn.Parameter(tensor))

    def forward(self, images: Tensor) -> Tensor:
        """The logits (N, classes) of normalised images (N, C, H, W)."""
        logits: Tensor = forward(self, self.host, self.topology, images)
        return logits

    def normalized(self, images: Tensor) -> Tensor:
        """Normalises uint8 images (N, C, H, W) as in training."""
        mean, std = (torch.tensor(x, device=images.device)[:, None, None] for x in self.pixels)
        return (images.float() / 255 - mean) / std

    def tensor(self, name: str) -> Tensor:
        """A parameter by its name."""
        owner, _, last = name.rpartition(".")
        return getattr(self._owners[owner], last)  # type: ignore[no-any-return]

    def batch_norm(self, x: Tensor, name: str) -> Tensor:
        """Batch norm with the tensors of this name."""
        at: Any = self._owners[name]
        if self.training:
            at.num_batches_tracked.add_(1)
        running = (at.running_mean, at.running_var)
        return functional.batch_norm(x, *running, at.weight, at.bias, self.training, 0.1, EPS)

    def conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        padding: Size,
        groups: int,
        *,
        bias: Tensor | None = None,
        stride: Size = 1,
        dilation: Size = 1,
    ) -> Tensor:
        """A convolution."""
        steps, around, apart = pair(stride), pair(padding), pair(dilation)
        return functional.conv2d(x, weight, bias, steps, around, apart, groups)

    def group_norm(self, x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
        """Group norm."""
        return functional.group_norm(x, groups, weight, bias, EPS)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Layer norm over the channels."""
        y = functional.layer_norm(x.movedim(1, -1), weight.shape, weight, bias, EPS)
        return y.movedim(-1, 1)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the channels."""
        # `functional.rms_norm` is newer than the oldest supported PyTorch.
        scale = torch.rsqrt(x.square().mean(1, keepdim=True) + EPS)
        return x * scale * weight.reshape(-1, *[1] * (x.ndim - 2))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer."""
        return functional.linear(x, weight, bias)

    def max_pool2d(
        self, x: Tensor, size: Size, stride: Size | None = None, padding: Size = 0
    ) -> Tensor:
        """The largest pixel of each window."""
        steps = pair(size if stride is None else stride)
        return functional.max_pool2d(x, pair(size), steps, pair(padding))

    def avg_pool2d(
        self, x: Tensor, size: Size, stride: Size | None = None, padding: Size = 0
    ) -> Tensor:
        """The mean of each window, with zeros around the image."""
        steps = pair(size if stride is None else stride)
        return functional.avg_pool2d(x, pair(size), steps, pair(padding))

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the pixels."""
        return x.mean((2, 3))

    def max(self, x: Tensor) -> Tensor:
        """The largest pixel."""
        return x.amax((2, 3))

    def flatten(self, x: Tensor) -> Tensor:
        """An image as a vector: channel by channel, each row by row."""
        return x.flatten(1)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """The channels of all parts."""
        return torch.cat(list(parts), 1)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of each two elements."""
        return a * b

    def relu(self, x: Tensor) -> Tensor:
        """``max(x, 0)``."""
        return functional.relu(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """The logistic function."""
        return torch.sigmoid(x)

    def tanh(self, x: Tensor) -> Tensor:
        """The hyperbolic tangent."""
        return torch.tanh(x)

    def leaky_relu(self, x: Tensor, slope: float) -> Tensor:
        """``x`` above 0, ``slope * x`` elsewhere."""
        return functional.leaky_relu(x, slope)

    def elu(self, x: Tensor) -> Tensor:
        """``x`` above 0, ``exp(x) - 1`` elsewhere."""
        return functional.elu(x)

    def gelu(self, x: Tensor) -> Tensor:
        """``x`` times the standard normal distribution at ``x``."""
        return functional.gelu(x)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """The approximation of GELU by tanh."""
        return functional.gelu(x, approximate="tanh")

    def silu(self, x: Tensor) -> Tensor:
        """``x`` times the logistic function of ``x``."""
        return functional.silu(x)

    def softplus(self, x: Tensor) -> Tensor:
        """``log(1 + exp(x))``."""
        return functional.softplus(x)

    def hard_swish(self, x: Tensor) -> Tensor:
        """``x * clamp(x + 3, 0, 6) / 6``."""
        return functional.hardswish(x)


def load(weights: "str | PathLike[str] | Weights") -> Network:
    """The network of a weights file, in evaluation mode.

    Raises:
        WeightsError: The file cannot be read, or was not written by meristem.
    """
    return Network(read(weights)).eval()
