"""PyTorch versions of the ready-made hosts and of multilayer perceptrons, for images of 3x32x32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, PIXELS = 10, 3 * 32 * 32


def conv_norm(inputs: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


class Block(nn.Module):
    """A residual block; the shortcut is a projection where the shape changes."""

    def __init__(self, inputs: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = conv_norm(inputs, out, 3, stride), conv_norm(out, out)
        self.shortcut = conv_norm(inputs, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def resnet(blocks: int) -> nn.Sequential:
    layers: list[nn.Module] = [conv_norm(3, 16), nn.ReLU()]
    inputs = 16
    for stage, width in enumerate((16, 32, 64)):
        for i in range(blocks):
            layers.append(Block(inputs, width, 2 if stage and not i else 1))
            inputs = width
    return nn.Sequential(*layers, Pooled(), nn.Linear(inputs, CLASSES))


def vgg8() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for stage, (width, convolutions) in enumerate(((32, 1), (64, 2), (128, 2), (128, 2))):
        if stage:
            layers.append(nn.MaxPool2d(2))
        for _ in range(convolutions):
            layers += [conv_norm(inputs, width), nn.ReLU()]
            inputs = width
    return nn.Sequential(*layers, Pooled(), nn.Linear(inputs, CLASSES))


def mobile() -> nn.Sequential:
    layers: list[nn.Module] = [conv_norm(3, 16), nn.ReLU()]
    inputs = 16
    for width, stride in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1)):
        layers += [conv_norm(inputs, inputs, 3, stride, inputs), nn.ReLU()]
        layers += [conv_norm(inputs, width, 1), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, Pooled(), nn.Linear(inputs, CLASSES))


def mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, width in zip([PIXELS, *widths], widths):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


def model(host: str) -> nn.Module:
    """The model of a host's name, such as `resnet8` or `mlp:256,256`."""
    match host.partition(":"):
        case ("resnet8", _, _):
            return resnet(1)
        case ("resnet20", _, _):
            return resnet(3)
        case ("vgg8", _, _):
            return vgg8()
        case ("mobile", _, _):
            return mobile()
        case ("mlp", _, widths):
            return mlp([int(width) for width in widths.split(",")])
    raise ValueError(f"no model of {host}")


if __name__ == "__main__":
    for name in ("resnet8", "resnet20", "vgg8", "mobile", "mlp:256,256"):
        parameters = sum(x.numel() for x in model(name).parameters())
        print(name, parameters, tuple(model(name)(torch.zeros(2, 3, 32, 32)).shape))
