"""Writes golden/blueprints.safetensors: every blueprint forward and backward at 8 and 16 channels.

All parameters are random and non-zero, including the zero-initialised last scale or layer: at
initialisation every blueprint is the identity, so that a comparison would test nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import GoldenFile, Tensors, generator
from torch import Tensor

EPS = 1e-5
BATCH, HEIGHT, WIDTH = 3, 5, 4
# Parameters at 8 and 16 channels.
PARAMETERS = {
    "norm": (17, 33),
    "attention": (40, 144),
    "depthwise": (152, 432),
    "bottleneck": (720, 864),
    "conv_small": (80, 288),
    "conv_light": (592, 2336),
    "conv_heavy": (1184, 4672),
}


@dataclass(frozen=True)
class Layer:
    """A layer's parameter shapes, and its output as a function of input and parameters."""

    kind: str
    shapes: dict[str, tuple[int, ...]]
    apply: Callable[[Tensor, Tensors], Tensor]


def groups_of(channels: int) -> int:
    """The largest divisor up to 32 with at least 16 channels per group, else the largest divisor."""
    dividing = [g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0]
    return next((g for g in dividing if channels // g >= 16), dividing[0])


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> Layer:
    shape = (outputs, inputs // groups, kernel, kernel)
    return Layer(
        f"conv{kernel}x{kernel}" if groups == 1 else f"depthwise{kernel}x{kernel}",
        {"weight": shape},
        lambda x, p: F.conv2d(x, p["weight"], padding=kernel // 2, groups=groups),
    )


def group_norm(channels: int) -> Layer:
    groups = groups_of(channels)
    return Layer(
        f"group_norm{groups}",
        {"weight": (channels,), "bias": (channels,)},
        lambda x, p: F.group_norm(x, groups, p["weight"], p["bias"], EPS),
    )


def linear(inputs: int, outputs: int, bias: bool) -> Layer:
    shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, inputs)}
    if bias:
        shapes["bias"] = (outputs,)
    return Layer("linear", shapes, lambda x, p: F.linear(x, p["weight"], p.get("bias")))


RELU = Layer("relu", {}, lambda x, _: torch.relu(x))
SIGMOID = Layer("sigmoid", {}, lambda x, _: torch.sigmoid(x))
POOL = Layer("global_avg_pool", {}, lambda x, _: x.mean((2, 3)))


def layers_of(blueprint: str, c: int) -> list[Layer]:
    mid = max(8, c // 4)
    table: dict[str, list[Layer]] = {
        "norm": [group_norm(c)],
        "attention": [POOL, linear(c, c // 4, False), RELU, linear(c // 4, c, True), SIGMOID],
        "depthwise": [conv(c, c, 3, groups=c), conv(c, c, 1), group_norm(c)],
        "bottleneck": [
            conv(c, mid, 1), RELU, conv(mid, mid, 3), RELU, conv(mid, c, 1), group_norm(c),
        ],
        "conv_small": [conv(c, c, 1), group_norm(c)],
        "conv_light": [conv(c, c, 3), group_norm(c)],
        "conv_heavy": [conv(c, c, 3), group_norm(c), RELU, conv(c, c, 3), group_norm(c)],
    }  # fmt: skip
    return table[blueprint]


def join(blueprint: str, x: Tensor, y: Tensor, t: Tensors) -> Tensor:
    """The combination of the chain's output y with the input x."""
    if blueprint == "norm":
        return x + torch.tanh(t["mix"]) * (y - x)
    if blueprint == "attention":
        return x * (2.0 * y)[:, :, None, None]
    return x + y


def add(golden: GoldenFile, blueprint: str, channels: int) -> None:
    case = f"{blueprint}_c{channels}"
    layers = layers_of(blueprint, channels)
    source = generator(case)
    inputs = {"x": torch.randn((BATCH, channels, HEIGHT, WIDTH), generator=source)}
    for i, layer in enumerate(layers):
        for name, shape in layer.shapes.items():
            fan_in = torch.Size(shape[1:]).numel()
            values = torch.randn(shape, generator=source) / fan_in**0.5
            inputs[f"layers.{i}.{name}"] = values
    if blueprint == "norm":
        inputs["mix"] = torch.tensor([0.7])
    count = sum(v.numel() for k, v in inputs.items() if k != "x")
    assert count == PARAMETERS[blueprint][channels // 16], f"{case}: {count} parameters"

    def forward(t: Tensors) -> Tensors:
        y = t["x"]
        for i, layer in enumerate(layers):
            y = layer.apply(y, {n: t[f"layers.{i}.{n}"] for n in layer.shapes})
        return {"y": join(blueprint, t["x"], y, t)}

    golden.add(
        case, blueprint, inputs, forward, grads=tuple(inputs),
        channels=channels, eps=EPS, groups=groups_of(channels), layers=[x.kind for x in layers],
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    file = GoldenFile("blueprints", "reference/blueprints.py: blueprints forward and backward")
    for name in PARAMETERS:
        for width in (8, 16):
            add(file, name, width)
    file.write()
