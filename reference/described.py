"""Writes golden/host_{residual,mixed,joined,squeezed,normed,dropped,signals}.safetensors: the first SGD steps of hosts that are described
layer by layer. The metadata has the description, in JSON.

The modules are written out by hand, so that they do not share a reader of descriptions with the test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import SEED
from hosts import CLASSES, write_host
from torch import Tensor, nn


class Residual(nn.Module):
    """body(x) + shortcut(x)."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Sequential | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class Sum(nn.Module):
    """The sum of branches."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (branch(x) for branch in self.branches)
        return sum(others, first)


class Pooled(nn.Module):
    """The mean over the image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Identity(nn.Identity):
    """A slot without a module."""


class Host(nn.Module):
    """Layers in order, named `layers.{i}`."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def conv(inputs: int, out: int, kernel: Any, **keys: Any) -> nn.Conv2d:
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    keys.setdefault("padding", tuple(side // 2 for side in sides))
    return nn.Conv2d(inputs, out, kernel, bias=keys.pop("bias", False), **keys)


def block(inputs: int, out: int, stride: int) -> Residual:
    body = [conv(inputs, out, 3, stride=stride), nn.BatchNorm2d(out), nn.ReLU()]
    body += [conv(out, out, 3), nn.BatchNorm2d(out)]
    if stride == 1:
        return Residual(nn.Sequential(*body))
    shortcut = nn.Sequential(conv(inputs, out, 1, stride=stride), nn.BatchNorm2d(out))
    return Residual(nn.Sequential(*body), shortcut)


def described(out: int, stride: int) -> dict[str, Any]:
    step = {} if stride == 1 else {"stride": stride}
    body: list[Any] = [{"conv2d": {"out": out, "kernel": 3} | step}, "batch_norm", "relu"]
    body += [{"conv2d": {"out": out, "kernel": 3}}, "batch_norm"]
    keys = {"body": body}
    if stride > 1:
        keys["shortcut"] = [{"conv2d": {"out": out, "kernel": 1} | step}, "batch_norm"]
    return {"residual": keys}


def residual() -> Host:
    return Host(
        conv(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Identity(),
        block(8, 8, 1), nn.ReLU(),
        block(8, 16, 2), nn.ReLU(), Identity(),
        block(16, 24, 3), nn.ReLU(),
        Pooled(), nn.Linear(24, CLASSES),
    )  # fmt: skip


RESIDUAL = [
    {"conv2d": {"out": 8, "kernel": 3}}, "batch_norm", "relu", {"slot": {"name": "stem"}},
    described(8, 1), "relu",
    described(16, 2), "relu", {"slot": {"name": "stage2"}},
    described(24, 3), "relu",
    "global_avg_pool", {"linear": {"out": "classes"}},
]  # fmt: skip


def mixed() -> Host:
    """Odd shapes: windows that are not square, even windows, groups, biases, unequal strides."""
    return Host(
        conv(3, 12, (2, 5), stride=(1, 2), padding=(0, 3), bias=True), nn.Tanh(),
        conv(12, 12, 3, groups=12), nn.GroupNorm(3, 12), nn.ReLU(),
        Sum(
            nn.Sequential(conv(12, 20, (1, 3)), nn.BatchNorm2d(20), Identity()),
            nn.Sequential(conv(12, 20, (3, 1), groups=4, bias=True), nn.Sigmoid()),
            nn.Sequential(conv(12, 20, 1, padding=0), Residual(nn.Sequential(conv(20, 20, 3), nn.Tanh()))),
        ),
        nn.MaxPool2d(3, 2), Identity(),
        Pooled(), nn.Linear(20, 17, bias=False), nn.ReLU(), nn.Linear(17, CLASSES),
    )  # fmt: skip


MIXED = [
    {"conv2d": {"out": 12, "kernel": [2, 5], "stride": [1, 2], "padding": [0, 3], "bias": True}}, "tanh",
    {"conv2d": {"out": 12, "kernel": 3, "groups": 12}}, {"group_norm": {"groups": 3}}, "relu",
    {"branches": {"join": "add", "branches": [
        [{"conv2d": {"out": 20, "kernel": [1, 3]}}, "batch_norm", {"slot": {"name": "inner"}}],
        [{"conv2d": {"out": 20, "kernel": [3, 1], "groups": 4, "bias": True}}, "sigmoid"],
        [{"conv2d": {"out": 20, "kernel": 1, "padding": "valid"}},
         {"residual": {"body": [{"conv2d": {"out": 20, "kernel": 3}}, "tanh"]}}],
    ]}},
    {"max_pool2d": {"kernel": 3, "stride": 2}}, {"slot": {"name": "outer"}},
    "global_avg_pool", {"linear": {"out": 17, "bias": False}}, "relu", {"linear": {"out": "classes"}},
]  # fmt: skip


class Joined(nn.Module):
    """Values that later layers read again, products, concatenations, vectors of images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({
            "0": conv(3, 8, 3, padding=0, dilation=2),
            "6": nn.Module(),
            "9": nn.Module(),
            "10": nn.Linear(12 + 20, 24),
            "13": nn.Linear(24, 24),
            "15": nn.Linear(24, CLASSES),
        })
        gate = nn.Sequential(conv(16, 12, 1), nn.Sigmoid())
        self.layers["6"].branches = nn.ModuleList([gate, nn.Sequential(conv(16, 12, 3))])
        flat = nn.Sequential(nn.Flatten(), nn.Linear(12 * 4 * 4, 20))
        self.layers["9"].branches = nn.ModuleList([nn.Module(), flat])

    def forward(self, x: Tensor) -> Tensor:
        at = self.layers
        a = F.relu(at["0"](x))
        x = F.max_pool2d(a, 3, 1, 1)
        x = F.avg_pool2d(x, (3, 1), 1, (1, 0))
        x = torch.cat([x, a], 1)
        gate, other = at["6"].branches
        x = F.max_pool2d(gate(x) * other(x), 2)
        x = torch.cat([x.amax((2, 3)), at["9"].branches[1](x)], 1)
        b = F.relu(at["10"](x))
        return at["15"](at["13"](b) + b)


JOINED = [
    {"conv2d": {"out": 8, "kernel": 3, "padding": "valid", "dilation": 2}}, "relu", {"save": {"name": "a"}},
    {"max_pool2d": {"kernel": 3, "stride": 1, "padding": 1}},
    {"avg_pool2d": {"kernel": [3, 1], "stride": 1, "padding": [1, 0]}},
    {"join": {"join": "concat", "from": ["a"]}},
    {"branches": {"join": "multiply", "branches": [
        [{"conv2d": {"out": 12, "kernel": 1}}, "sigmoid"], [{"conv2d": {"out": 12, "kernel": 3}}],
    ]}},
    {"slot": {"name": "middle"}}, {"max_pool2d": {"kernel": 2}},
    {"branches": {"join": "concat", "branches": [
        ["global_max_pool"], ["flatten", {"linear": {"out": 20}}],
    ]}},
    {"linear": {"out": 24}}, "relu", {"save": {"name": "b"}},
    {"linear": {"out": 24}}, {"join": {"join": "add", "from": ["b"]}},
    {"linear": {"out": "classes"}},
]  # fmt: skip


class Squeezed(nn.Module):
    """Squeeze-and-excitation by convolutions and by linear layers, and values that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, 12, 3, stride=2), nn.BatchNorm2d(12)
        self.body = conv(12, 12, 3)
        self.squeeze, self.excite = conv(12, 4, 1, bias=True), conv(4, 12, 1, bias=True)
        self.narrow, self.wide, self.side = nn.Linear(12, 6), nn.Linear(6, 12), conv(12, 12, 3)
        self.b, self.c, self.d, self.e = (conv(12, 12, k) for k in (3, 1, 3, 1))
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.bn(self.stem(x)))
        y = self.body(x)
        gate = self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True))))
        x = torch.tanh(y * torch.sigmoid(gate) + x)
        gate = torch.sigmoid(self.wide(F.silu(self.narrow(x.mean((2, 3))))))
        x = gate[:, :, None, None] * self.side(x)
        b, c = self.b(x), self.c(x)
        return self.last((self.e(b * c) + self.d(c + b)).mean((2, 3)))


SQUEEZED = [
    {"conv2d": {"out": 12, "kernel": 3, "stride": 2, "name": "stem"}}, {"batch_norm": {"name": "bn"}}, "tanh",
    {"residual": {"body": [
        {"conv2d": {"out": 12, "kernel": 3, "name": "body"}}, {"slot": {"name": "inner"}},
        {"branches": {"join": "multiply", "branches": [[], [
            "global_avg_pool", {"conv2d": {"out": 4, "kernel": 1, "bias": True, "name": "squeeze"}}, "silu",
            {"conv2d": {"out": 12, "kernel": 1, "bias": True, "name": "excite"}}, "sigmoid",
        ]]}},
    ]}}, "tanh",
    {"branches": {"join": "multiply", "branches": [
        ["global_avg_pool", {"linear": {"out": 6, "name": "narrow"}}, "silu",
         {"linear": {"out": 12, "name": "wide"}}, "sigmoid"],
        [{"conv2d": {"out": 12, "kernel": 3, "name": "side"}}],
    ]}},
    {"save": {"name": "a"}}, {"conv2d": {"out": 12, "kernel": 3, "name": "b"}}, {"save": {"name": "b"}},
    {"load": {"name": "a"}}, {"conv2d": {"out": 12, "kernel": 1, "name": "c"}}, {"save": {"name": "c"}},
    {"join": {"join": "add", "from": ["b"]}}, {"conv2d": {"out": 12, "kernel": 3, "name": "d"}}, {"save": {"name": "d"}},
    {"load": {"name": "b"}}, {"join": {"join": "multiply", "from": ["c"]}},
    {"conv2d": {"out": 12, "kernel": 1, "name": "e"}}, {"join": {"join": "add", "from": ["d"]}},
    {"slot": {"name": "late"}}, "global_avg_pool", {"linear": {"out": "classes", "name": "last"}},
]  # fmt: skip


class ChannelNorm(nn.Module):
    """A norm over the channels of each pixel."""

    def __init__(self, channels: int, centred: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        if centred:
            self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x, shape = x.movedim(1, -1), self.weight.shape
        if hasattr(self, "bias"):
            x = F.layer_norm(x, shape, self.weight, self.bias, 1e-5)
        else:
            x = F.rms_norm(x, shape, self.weight, 1e-5)
        return x.movedim(-1, 1)


def normed() -> Host:
    """A block as in ConvNeXt, and norms of vectors."""
    block = [conv(12, 12, 7, groups=12, bias=True), ChannelNorm(12, True)]
    block += [conv(12, 32, 1, bias=True), nn.GELU(), conv(32, 12, 1, bias=True)]
    return Host(
        conv(3, 12, 2, stride=2, padding=0, bias=True), ChannelNorm(12, True), Identity(),
        Residual(nn.Sequential(*block)), conv(12, 20, 3, stride=2), ChannelNorm(20, False), nn.SiLU(),
        Pooled(), nn.LayerNorm(20), nn.Linear(20, 24), nn.RMSNorm(24, 1e-5), nn.Linear(24, CLASSES),
    )  # fmt: skip


NORMED = [
    {"conv2d": {"out": 12, "kernel": 2, "stride": 2, "padding": "valid", "bias": True}}, "layer_norm",
    {"slot": {"name": "stem"}},
    {"residual": {"body": [
        {"conv2d": {"out": 12, "kernel": 7, "groups": 12, "bias": True}}, "layer_norm",
        {"conv2d": {"out": 32, "kernel": 1, "bias": True}}, "gelu",
        {"conv2d": {"out": 12, "kernel": 1, "bias": True}},
    ]}},
    {"conv2d": {"out": 20, "kernel": 3, "stride": 2}}, "rms_norm", "silu",
    "global_avg_pool", "layer_norm", {"linear": {"out": 24}}, "rms_norm", {"linear": {"out": "classes"}},
]  # fmt: skip


WORD = 2**32 - 1


def philox(key: tuple[int, int], counter: tuple[int, ...]) -> list[int]:
    """Philox4x32 with 10 rounds (Salmon et al. 2011): four words."""
    k0, k1 = key
    x = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ k0, b & WORD, a >> 32 ^ x[3] ^ k1, a & WORD]
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return x


class Dropout(nn.Module):
    """Dropout with the draws of seed 1, env 0 and a layer's name."""

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        # The setting is an f32.
        self.p, self.batch = float(np.float32(p)), 0
        hash64 = 0xCBF29CE484222325
        for byte in name.encode():
            hash64 = (hash64 ^ byte) * 0x100000001B3 % 2**64
        k0, k1, *_ = philox((1, 0), (0, 12, 0, 0))
        first, second, *_ = philox((k0, k1), (0, 0, hash64 & WORD, hash64 >> 32))
        self.key = (first, second)

    def mask(self, shape: torch.Size) -> Tensor:
        """The kept elements of the current batch."""
        count, batch = shape.numel(), (self.batch & WORD, self.batch >> 32)
        blocks = range((count + 63) // 64 * 16)
        words = np.array([philox(self.key, (block, 0, *batch)) for block in blocks])
        # Word w of 16 neighbouring blocks has 16 neighbouring elements.
        words = words.reshape(-1, 16, 4).transpose(0, 2, 1).reshape(-1)[:count]
        kept = torch.from_numpy(words >= round(self.p * 2**32))
        if len(shape) == 2:
            return kept.view(shape)
        n, c, h, w = shape
        return kept.view(n, h, w, c).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.mask(x.shape)
        self.batch += 1
        return x * kept / (1 - self.p)


def dropped() -> Host:
    """Dropout of images and vectors, beside layers that are computed together."""
    body = [conv(8, 8, 3), nn.BatchNorm2d(8), Dropout("inner", 0.1)]
    return Host(
        conv(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Dropout("layers.3", 0.2), nn.MaxPool2d(2), Identity(),
        Residual(nn.Sequential(*body)), nn.ReLU(), Pooled(), Dropout("layers.9", 0.5),
        nn.Linear(8, 30), nn.ReLU(), Dropout("layers.12", 0.0), nn.Linear(30, CLASSES),
    )  # fmt: skip


DROPPED = [
    {"conv2d": {"out": 8, "kernel": 3}}, "batch_norm", "relu", {"dropout": {"p": 0.2}},
    {"max_pool2d": {"kernel": 2}}, {"slot": {"name": "stem"}},
    {"residual": {"body": [
        {"conv2d": {"out": 8, "kernel": 3}}, "batch_norm", {"dropout": {"p": 0.1, "name": "inner"}},
    ]}}, "relu",
    "global_avg_pool", {"dropout": {"p": 0.5}}, {"linear": {"out": 30}}, "relu", {"dropout": {"p": 0}},
    {"linear": {"out": "classes"}},
]  # fmt: skip


class Signals(Host):
    """Signals, which the file has as images of one row."""

    def __init__(self) -> None:
        body = [nn.Conv1d(10, 10, 3, padding=2, dilation=2, groups=10, bias=False), nn.GroupNorm(2, 10), nn.Tanh()]
        super().__init__(
            nn.Conv1d(3, 10, 5, stride=2, padding=2, bias=False), nn.BatchNorm1d(10), nn.ReLU(), Identity(),
            Residual(nn.Sequential(*body)), nn.MaxPool1d(3, 2, 1),
            nn.Conv1d(10, 12, 4, padding=1, groups=2), nn.SiLU(), nn.AvgPool1d(2), Identity(),
            nn.Conv1d(12, 7, 3, bias=False), nn.Flatten(), nn.Linear(7 * 3, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.squeeze(2))


SIGNALS = [
    {"conv1d": {"out": 10, "kernel": 5, "stride": 2}}, "batch_norm", "relu", {"slot": {"name": "stem"}},
    {"residual": {"body": [
        {"conv1d": {"out": 10, "kernel": 3, "dilation": 2, "groups": 10}}, {"group_norm": {"groups": 2}}, "tanh",
    ]}},
    {"max_pool1d": {"kernel": 3, "stride": 2, "padding": 1}},
    {"conv1d": {"out": 12, "kernel": 4, "padding": 1, "groups": 2, "bias": True}}, "silu",
    {"avg_pool1d": {"kernel": 2}}, {"slot": {"name": "late"}},
    {"conv1d": {"out": 7, "kernel": 3, "padding": "valid"}}, "flatten", {"linear": {"out": "classes"}},
]  # fmt: skip


def write(name: str, make: Callable[[], nn.Module], layers: list[Any], side: int, rows: int | None = None) -> None:
    torch.manual_seed(SEED)
    description = json.dumps({"name": name, "layers": layers})
    recipe = "reference/described.py: the first SGD steps of a described host"
    write_host(name, make, side, 20, recipe, rows=rows, description=description)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write("residual", residual, RESIDUAL, 13)
    write("mixed", mixed, MIXED, 11)
    write("joined", Joined, JOINED, 12)
    write("normed", normed, NORMED, 14)
    write("dropped", dropped, DROPPED, 12)
    write("squeezed", Squeezed, SQUEEZED, 13)
    write("signals", Signals, SIGNALS, 43, rows=1)
