"""Grown networks as PyTorch modules. Requires ``torch``."""

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .network import EPS, forward, host_of, normalization, read, topology_of
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
        for name, array in weights.tensors.items():
            *path, last = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
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
        return self.get_parameter(name)

    def batch_norm(self, x: Tensor, name: str) -> Tensor:
        """Batch norm with the tensors of this name."""
        at: Any = self.get_submodule(name)
        if self.training:
            at.num_batches_tracked.add_(1)
        running = (at.running_mean, at.running_var)
        return functional.batch_norm(x, *running, at.weight, at.bias, self.training, 0.1, EPS)

    def conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        padding: tuple[int, int],
        groups: int,
        stride: tuple[int, int] = (1, 1),
    ) -> Tensor:
        """A convolution without bias."""
        return functional.conv2d(x, weight, stride=stride, padding=padding, groups=groups)

    def group_norm(self, x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
        """Group norm."""
        return functional.group_norm(x, groups, weight, bias, EPS)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer."""
        return functional.linear(x, weight, bias)

    def max_pool2d(self, x: Tensor, size: int, stride: int) -> Tensor:
        """The largest of each ``size`` × ``size`` pixels, ``stride`` pixels apart."""
        return functional.max_pool2d(x, size, stride)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the pixels."""
        return x.mean((2, 3))

    def relu(self, x: Tensor) -> Tensor:
        """``max(x, 0)``."""
        return functional.relu(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """The logistic function."""
        return torch.sigmoid(x)

    def tanh(self, x: Tensor) -> Tensor:
        """The hyperbolic tangent."""
        return torch.tanh(x)


def load(weights: "str | PathLike[str] | Weights") -> Network:
    """The network of a weights file, in evaluation mode.

    Raises:
        WeightsError: The file cannot be read, or was not written by meristem.
    """
    return Network(read(weights)).eval()
