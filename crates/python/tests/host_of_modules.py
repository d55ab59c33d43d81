"""Small PyTorch modules, and their comparison with hosts, before and after training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F

import meristem
import meristem.torch
from meristem.network import logits
from meristem.torch import host_of


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


def settings(folder: Path, init: Path, host: meristem.Host) -> dict[str, Any]:
    """Settings of twenty SGD steps in the order of the dataset."""
    return {
        "host": host, "init": init, "run_dir": folder / "run", "envs": 1, "steps": 1, "rounds": 1,
        "batch": 16, "max_batches": 20, "shuffle": False, "augment": "none", "controller": "none",
        "statistics_batches": 0, "log_batches": True, "threads": 1, "winograd": False,
    }  # fmt: skip


def sgd(module: nn.Module, dtype: Any) -> list[float]:
    """The losses of twenty steps, with the engine's default settings."""
    module.to(dtype).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    losses = []
    batches = meristem.GatherBatches(meristem.Dataset(), 16, shuffle=False, max_batches=20)
    for [batch] in batches.epoch(0):
        x, y = torch.from_dlpack(batch.inputs).to(dtype), torch.from_dlpack(batch.targets).long()
        # In PyTorch 2.15 oneDNN's backward pass of strided 1x1 convolutions writes beyond its memory.
        with torch.backends.mkldnn.flags(enabled=False):
            loss = F.cross_entropy(module(x), y)
            optimiser.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


def follow(folder: Path, module: nn.Module, exact: nn.Module, **keys: Any) -> Any:
    """The run of twenty steps of a module as a host. Its losses and tensors are those of ``exact``,
    a module of the same kind, in float64."""
    host, weights = host_of(module, images(2, 1, 28), **keys)
    weights.save(folder / "w.safetensors")
    run = meristem.train(**settings(folder, folder / "w.safetensors", host))
    exact.load_state_dict(module.state_dict())
    wanted, rounded = np.array(sgd(exact, torch.float64)), np.array(sgd(module, torch.float32))
    # In float32, PyTorch's losses are up to 3e-6 from float64 and its tensors up to 7e-5; the
    # engine's up to 3e-7 and 3e-6. Another order of sums may have some times as much.
    assert np.abs(run.batches["loss"] - wanted).max() < 1e-5
    assert np.abs(rounded - wanted).max() < 1e-5
    trained = meristem.torch.load(run.weights(0)).state_dict()
    assert trained.keys() == exact.state_dict().keys()
    for name, tensor in exact.state_dict().items():
        assert relative(trained[name], tensor.double()) < 1e-4, name
    return run


def relative(got: Any, wanted: Any) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-12))
