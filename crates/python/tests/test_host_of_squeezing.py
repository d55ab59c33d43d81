"""Squeeze-and-excitation, and values that two layers read, of PyTorch modules as hosts. Needs PyTorch,
which is not part of CI."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F

import meristem
import meristem.torch
from host_of_modules import Fn, compare, conv, follow, images, kinds, simple

from meristem import errors
from meristem import nn as layers
from meristem.torch import host_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)


def linear(self: Any, x: Any) -> Any:
    """The gate of a block of linear layers (N, C)."""
    return torch.sigmoid(self.excite(self.squeeze(x.mean((2, 3))).relu()))


def linears() -> dict[str, nn.Module]:
    return {"squeeze": nn.Linear(4, 2), "excite": nn.Linear(2, 4)}


def convs() -> dict[str, nn.Module]:
    return {"squeeze": nn.Conv2d(4, 2, 1), "excite": nn.Conv2d(2, 4, 1, bias=False)}


def pooled(self: Any, x: Any) -> Any:
    """The gate of a block of convolutions (N, C, 1, 1)."""
    return self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


def viewed(self: Any, x: Any) -> Any:
    n, c, _, _ = x.shape
    y = self.squeeze(F.adaptive_avg_pool2d(x, 1).view(n, c)).relu()
    return x * self.excite(y).sigmoid().view(n, c, 1, 1).expand_as(x)


FORMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], dict[str, nn.Module]]]] = {
    "convolutions": (lambda self, x: x * pooled(self, x), convs),
    "gate first": (lambda self, x: pooled(self, x) * x, convs),
    "in place": (lambda self, x: self.conv2(x).mul_(pooled(self, x)), lambda: {**convs(), "conv2": conv(4, 4)}),
    "residual": (lambda self, x: x + self.conv2(x) * pooled(self, x), lambda: {**convs(), "conv2": conv(4, 4)}),
    "linear": (lambda self, x: x * linear(self, x)[:, :, None, None], linears),
    "ellipsis": (lambda self, x: x * linear(self, x)[..., None, None], linears),
    "unsqueezed": (lambda self, x: linear(self, x).unsqueeze(-1).unsqueeze(-1) * x, linears),
    "viewed and expanded": (viewed, linears),
    "expanded": (lambda self, x: x * pooled(self, x).expand(-1, -1, 8, 8), convs),
    "maximum": (lambda self, x: x * self.squeeze(x.amax((2, 3), keepdim=True)).sigmoid(),
                lambda: {"squeeze": conv(4, 4, 1)}),
    "two gates": (lambda self, x: x * pooled(self, x) * x.mean((2, 3), keepdim=True), convs),
    "of a vector and an image": (
        lambda self, x: (pooled(self, x) + x.amax((2, 3), keepdim=True)) * x, convs),
    "convolution over the padding": (
        lambda self, x: self.squeeze(x.mean((2, 3), keepdim=True)), lambda: {"squeeze": conv(4, 4, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_gate(name: str) -> None:
    forward, parts = FORMS[name]
    module, x = simple(forward, **parts()), images(2, side=8)
    host, weights = host_of(module, x)
    compare(module, host, weights, x)
    names = {key for key, _ in module.named_parameters()}
    assert names == set(weights.tensors)


def test_gates_of_signals() -> None:
    def forward(self: Any, x: Any) -> Any:
        x = self.conv(x)
        return self.fc((x * self.gate(x.mean(2, keepdim=True)).sigmoid()).mean(2))

    parts = {"conv": nn.Conv1d(2, 4, 3, padding=1), "gate": nn.Conv1d(4, 4, 1), "fc": nn.Linear(4, 3)}
    module, x = Fn(forward, **parts), torch.randn(3, 2, 9)
    host, weights = host_of(module, x)
    compare(module, host, weights, x)


def test_a_block_becomes_a_product_of_branches() -> None:
    module = simple(lambda self, x: x * linear(self, x)[:, :, None, None], **linears())
    host, _ = host_of(module, images(2, side=8))
    _, product, _, _ = host.layers
    assert isinstance(product, layers.Branches) and product.join == "multiply"
    identity, gate = product.branches
    gated = [layers.GlobalAvgPool, layers.Linear, layers.ReLU, layers.Linear, layers.Sigmoid]
    assert not identity and kinds(gate) == gated
    outputs = [layer.output for layer in host.summary((3, 8, 8)).layers]
    assert outputs[-3] == (4, 8, 8), outputs


def crossed(self: Any, x: Any) -> Any:
    """Two values that two layers each read: no order of branches nests them."""
    b, c = self.b(x), self.c(x)
    return self.d(b + c) + self.e(b * c)


def test_values_that_two_layers_read_are_loaded() -> None:
    def in_order(self: Any, x: Any) -> Any:
        b = self.b(x)
        return self.head(torch.cat([self.c(b), b, self.d(b), x, self.e(x)], 1))

    for forward, parts in [(crossed, {}), (in_order, {"head": conv(20, 4, 1)})]:
        fours = {name: conv(4, 4) for name in "bcde"}
        module, x = simple(forward, **fours, **parts), images(2, side=8)
        host, weights = host_of(module, x, slots=["b"])
        assert '"load"' in host.description
        compare(module, host, weights, x)


class Excited(nn.Module):
    """A network with blocks of both forms, and values that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(1, 4, stride=2), nn.BatchNorm2d(4)
        self.side, self.squeeze, self.excite = conv(4, 4), nn.Linear(4, 2), nn.Linear(2, 4)
        self.gate = nn.Conv2d(4, 4, 1)
        self.b, self.c, self.d, self.e = (conv(4, 4) for _ in range(4))
        self.fc = nn.Linear(4, 10)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.bn(self.conv(x)))
        y = self.side(x)
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3))))))[:, :, None, None]
        x = torch.tanh(x + y)
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        return self.fc(crossed(self, x).mean((2, 3)))


def test_twenty_steps_with_gates_are_those_of_pytorch(tmp_path: Path) -> None:
    run = follow(tmp_path, Excited(), Excited(), slots=["b", "side"])
    again = Excited()
    again.load_state_dict(meristem.torch.load(run.weights(0)).state_dict())


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "rows": (lambda self, x: x * x.mean(1, keepdim=True), ["dim=1, expected dim=(2, 3)"]),
    "sum": (lambda self, x: x + x.mean((2, 3), keepdim=True),
            ["shapes (2, 4, 8, 8) and (2, 4, 1, 1)", "an image times one value for each"]),
    "repeated alone": (lambda self, x: torch.tanh(x.mean((2, 3), keepdim=True).expand_as(x)),
                       ["a tensor (2, 4, 1, 1) repeated to (2, 4, 8, 8)", "without `expand`"]),
    "all repeated": (lambda self, x: x.mean((2, 3), True).expand_as(x) * x.amax((2, 3), True).expand_as(x),
                     ["a product of values that are all repeated"]),
    "part": (lambda self, x: x[:, [1, 0, 2, 3]], ["the index [1, 0, 2, 3]", "leave the parts together"]),
    "rows of a batch": (lambda self, x: x[:1], ["the index slice(None, 1, None)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_layer_stands_for_is_refused(name: str) -> None:
    forward, texts = REFUSED[name]
    with pytest.raises(errors.SettingError) as raised:
        host_of(simple(forward), images(2, side=8))
    text = f"{raised.value}"
    assert all(part in text for part in texts), text
