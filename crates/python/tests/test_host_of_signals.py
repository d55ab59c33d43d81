"""PyTorch modules for signals as hosts. Needs PyTorch, which is not part of CI."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F

from host_of_modules import Fn, compare, kinds, warmed

import meristem
import meristem.torch
from meristem import errors
from meristem import nn as layers
from meristem.torch import host_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)


class Block(nn.Module):
    """A residual block over signals."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=2, dilation=2, bias=False)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.norm(self.conv(x)) + x)


def network(inputs: int = 1, width: int = 8, classes: int = 10) -> nn.Module:
    """Convolutions with strides, groups and pools, and a classifier of the mean."""
    return nn.Sequential(
        nn.Conv1d(inputs, width, 5, stride=2, padding=2), nn.BatchNorm1d(width), nn.Tanh(),
        nn.MaxPool1d(3, 1, 1), Block(width),
        nn.Conv1d(width, 2 * width, 4, padding=1, groups=2), nn.GroupNorm(4, 2 * width), nn.GELU(),
        nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * width, classes),
    )  # fmt: skip


def signals(count: int = 3, channels: int = 2, points: int = 24) -> Any:
    return torch.randn(count, channels, points)


def test_a_module_for_signals_and_its_host_have_the_same_logits(tmp_path: Path) -> None:
    module, x = warmed(network(2)), signals()
    host, weights = host_of(module, x, slots=["3", "4"])
    wanted = [layers.Conv1d, layers.BatchNorm, layers.Tanh, layers.MaxPool1d, layers.Slot, layers.Residual]
    assert kinds(host.layers)[:6] == wanted
    assert weights.metadata["inputs"]["kind"] == "signal"
    assert weights.tensors["0.weight"].shape == (8, 2, 5)
    weights.save(tmp_path / "w.safetensors")
    compare(module, host, meristem.weights.load(tmp_path / "w.safetensors"), x)
    assert isinstance(host.layers[-1], layers.Linear) and host.layers[-1].out == "classes"


def head(pool: Callable[[Any], Any]) -> nn.Module:
    """A module that pools two channels of 12 points, and flattens them."""
    with torch.no_grad():
        width = pool(torch.zeros(2, 2, 12)).flatten(1).shape[1]

    def forward(self: Any, x: Any) -> Any:
        return self.fc(pool(self.conv(x)).flatten(1))

    return Fn(forward, conv=nn.Conv1d(3, 2, 3, padding="same"), fc=nn.Linear(width, 5))


POOLS: list[tuple[Callable[[Any], Any], list[layers.Layer]]] = [
    (lambda x: F.max_pool1d(x, 2), [layers.MaxPool1d(2)]),
    (lambda x: F.max_pool1d(x, (3,), stride=2, padding=1), [layers.MaxPool1d(3, 2, 1)]),
    (lambda x: torch.max_pool1d(x, 3, 1), [layers.MaxPool1d(3, 1)]),
    (lambda x: F.avg_pool1d(x, 3, 2, 1), [layers.AvgPool1d(3, 2, 1)]),
    (lambda x: F.avg_pool1d(x, 4, count_include_pad=False), [layers.AvgPool1d(4)]),
    (lambda x: F.adaptive_avg_pool1d(x, 1), [layers.GlobalAvgPool()]),
    (lambda x: F.adaptive_avg_pool1d(x, 4), [layers.AvgPool1d(3)]),
    (lambda x: F.adaptive_avg_pool1d(x, 12), []),
    (lambda x: F.adaptive_max_pool1d(x, 1), [layers.GlobalMaxPool()]),
    (lambda x: F.adaptive_max_pool1d(x, 6), [layers.MaxPool1d(2)]),
    (lambda x: x.mean(2), [layers.GlobalAvgPool()]),
    (lambda x: torch.mean(x, dim=-1, keepdim=True).squeeze(-1), [layers.GlobalAvgPool()]),
    (lambda x: x.amax([2]), [layers.GlobalMaxPool()]),
    (lambda x: x.reshape(x.shape[0], -1), [layers.Flatten()]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(POOLS)))
def test_every_form_of_a_pool_of_signals(number: int) -> None:
    pool, wanted = POOLS[number]
    module, x = head(pool), signals(2, 3, 12)
    host, weights = host_of(module, x)
    found = [layer for layer in host.layers[1:-1] if layer != layers.Flatten() or layer in wanted]
    for layer in found:
        layer.name = None
    assert found == wanted
    compare(module, host, weights, x)


def test_pools_as_modules() -> None:
    module = nn.Sequential(
        nn.Conv1d(3, 4, 3, padding="valid", bias=False), nn.MaxPool1d(2, 1), nn.AdaptiveMaxPool1d(3),
        nn.AvgPool1d(3, 1, 1), nn.AdaptiveMaxPool1d((1,)), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    x = signals(2, 3, 12)
    host, weights = host_of(module, x)
    assert (host.layers[0].padding, host.layers[0].bias) == ("valid", False)
    found = [layers.MaxPool1d(2, 1), layers.MaxPool1d(3), layers.AvgPool1d(3, 1, 1)]
    for layer in (given := host.layers[1:4]):
        layer.name = None
    assert given == found and host.layers[4] == layers.GlobalMaxPool()
    compare(module, host, weights, x)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "convolution of images": (lambda self, x: self.image(x[:, :, None]), ["`getitem`"]),
    "adaptive": (lambda self, x: F.adaptive_avg_pool1d(x, 5).mean(2),
                 ["12 points to 5", "divides the signal's"]),
    "dilated pool": (lambda self, x: F.max_pool1d(x, 2, dilation=2).mean(2), ["dilation=2"]),
    "indices": (lambda self, x: F.max_pool1d(x, 2, return_indices=True)[0].mean(2),
                ["return_indices=True, expected return_indices=False"]),
    "mean of channels": (lambda self, x: self.fc(x.mean(1)), ["dim=1, expected dim=2"]),
    "pool of images": (lambda self, x: F.max_pool2d(x, 1).mean(2),
                       ["a tensor of shape (2, 4, 12), expected images (N, C, H, W)"]),
    "pooled": (lambda self, x: F.avg_pool1d(F.adaptive_avg_pool1d(x, 1), 1).mean(2),
               ["a pooled signal, expected a signal"]),
    "dropout of channels": (lambda self, x: F.dropout1d(x, 0.5).mean(2), ["single elements"]),
    "linear of points": (lambda self, x: self.fc(x).mean(2),
                         ["a tensor of shape (2, 4, 12), expected vectors (N, F)"]),
    "reshaped": (lambda self, x: x.reshape(-1, 6, 8).mean(2), ["a signal as a vector"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_layer_is_refused_with_its_place(name: str) -> None:
    forward, words = REFUSED[name]
    parts = {"conv": nn.Conv1d(3, 4, 1), "fc": nn.Linear(12, 5), "image": nn.Conv2d(4, 4, 1)}
    module = Fn(lambda self, x: forward(self, self.conv(x)), **parts)
    with pytest.raises(errors.SettingError) as raised:
        host_of(module, signals(2, 3, 12))
    text = str(raised.value)
    assert [word for word in words if word not in text] == [], text
    assert raised.value.exit_code == 2 and raised.value.remedy


def relative(got: Any, wanted: Any) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-12))


def test_twenty_steps_are_those_of_pytorch(tmp_path: Path) -> None:
    """The tolerances are those of images in test_host_of.py, for the same number of steps."""
    module, exact = network(), network()
    host, weights = host_of(module, signals(2, 1, 40), slots=["4"])
    weights.save(tmp_path / "w.safetensors")
    run = meristem.train(
        dataset="mnist1d", host=host, init=tmp_path / "w.safetensors", run_dir=tmp_path / "run",
        envs=1, steps=1, rounds=1, batch=16, max_batches=20, shuffle=False, controller="none",
        statistics_batches=0, log_batches=True, threads=1, winograd=False,
    )  # fmt: skip
    exact.load_state_dict(module.state_dict())
    exact.double().train()
    sgd = torch.optim.SGD(exact.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    losses = []
    data = meristem.Dataset("mnist1d")
    for [batch] in meristem.GatherBatches(data, 16, shuffle=False, max_batches=20).epoch(0):
        x, y = torch.from_dlpack(batch.inputs).double(), torch.from_dlpack(batch.targets).long()
        loss = F.cross_entropy(exact(x.reshape(16, 1, 40)), y)
        sgd.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(exact.parameters(), 1.0)
        sgd.step()
        losses.append(loss.item())
    assert np.abs(run.batches["loss"] - np.array(losses)).max() < 1e-5
    trained = meristem.torch.load(run.weights(0)).state_dict()
    for name, tensor in exact.state_dict().items():
        assert relative(trained[name], tensor.double()) < 1e-4, name
    # Weights keep their shapes, so that the module takes them back.
    module.load_state_dict(trained)


def test_modules_grow_in_the_slots_of_a_module_for_signals(tmp_path: Path) -> None:
    host, weights = host_of(network(width=16), signals(2, 1, 40), slots=["4", "7"])
    weights.save(tmp_path / "w.safetensors")
    run = meristem.train(
        dataset="mnist1d", host=host, init=tmp_path / "w.safetensors", run_dir=tmp_path / "run",
        envs=1, steps=4, batch=32, max_batches=2, control_split=0.2, threads=1, controller="random",
    )  # fmt: skip
    assert run.summary["status"] == "completed"
    assert sum(env["modules"] != [] for env in run.summary["envs"]) == 1
