"""PyTorch modules as hosts. Needs PyTorch, which is not part of CI."""

import re
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
from host_of_modules import Fn, compare, conv, follow, images, kinds, simple, warmed

from meristem import errors
from meristem import nn as layers
from meristem.torch import host_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)


class Block(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inputs: int, out: int, stride: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, out, stride=stride), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True) if act is nn.ReLU else act()
        self.conv2, self.bn2 = conv(out, out), nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                conv(inputs, out, 1, stride=stride), nn.BatchNorm2d(out)
            )

    def forward(self, x: Any) -> Any:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet-18 for small images, with two stages."""

    def __init__(
        self, channels: int = 3, width: int = 8, act: type[nn.Module] = nn.ReLU
    ) -> None:
        super().__init__()
        twice = 2 * width
        self.conv1, self.bn1 = conv(channels, width), nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1, act), Block(width, width, 1, act))
        self.layer2 = nn.Sequential(Block(width, twice, 2, act), Block(twice, twice, 1, act))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.act = act()
        self.fc = nn.Linear(twice, 10)

    def forward(self, x: Any) -> Any:
        x = self.act(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


def mobile() -> nn.Module:
    def separable(inputs: int, out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            conv(inputs, inputs, stride=stride, groups=inputs), nn.BatchNorm2d(inputs),
            nn.Hardswish(), conv(inputs, out, 1), nn.BatchNorm2d(out), nn.Hardswish(),
        )  # fmt: skip

    return nn.Sequential(
        conv(3, 8, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        separable(8, 16, 1), separable(16, 24, 2), separable(24, 24, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(24, 10),
    )  # fmt: skip


def vgg() -> nn.Module:
    features = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2, 2),
        nn.Conv2d(8, 12, 3, padding="same"), nn.ReLU(True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(12, 12, 3, padding="valid"), nn.GroupNorm(3, 12), nn.LeakyReLU(0.2),
    )  # fmt: skip
    classifier = nn.Sequential(
        nn.Linear(12 * 6 * 6, 20), nn.ReLU(True), nn.Dropout(), nn.Linear(20, 10)
    )

    def forward(self: Any, x: Any) -> Any:
        x = self.features(x)
        return self.classifier(x.view(x.size(0), -1))

    return Fn(forward, features=features, classifier=classifier).eval()


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 32 * 32, 32), nn.BatchNorm1d(32), nn.GELU("tanh"),
        nn.Sequential(nn.Linear(32, 16, bias=False), nn.Identity(), nn.SiLU()), nn.Linear(16, 10),
    )  # fmt: skip


class Dense(nn.Module):
    """A dense block whose layers read all values before them, and a product with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4, stride=2)
        self.grow = nn.ModuleList(conv(4 + 3 * i, 3) for i in range(3))
        self.gate, self.value = nn.Conv2d(13, 6, 1), nn.Conv2d(13, 6, (1, 3), padding=(0, 1))
        self.squeeze, self.excite = nn.Linear(12, 4), nn.Linear(4, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Any) -> Any:
        found = [self.stem(x)]
        for grow in self.grow:
            found.append(torch.relu(grow(torch.cat(found, 1))))
        x = torch.cat(found, dim=1)
        x = torch.sigmoid(self.gate(x)) * self.value(x)
        x = torch.cat((x.mean((2, 3)), torch.amax(x, dim=(-1, -2))), 1)
        # Squeeze and excitation of the features of a vector.
        x = x * self.excite(self.squeeze(x).relu()).sigmoid()
        return self.head(x)


class Skips(nn.Module):
    """Sums that overlap: the second reads a value inside the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (conv(i, 4) for i in (3, 4, 4, 4))
        self.head = nn.Linear(4, 10)

    def forward(self, x: Any) -> Any:
        first = self.a(x)
        second = self.b(first).tanh()
        third = torch.add(self.c(second), first)
        x = self.d(third) + second
        return self.head((x + x).mean(dim=[2, 3], keepdim=True).squeeze(-1).squeeze(-1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": ResNet,
    "mobile": mobile,
    "vgg": vgg,
    "perceptron": perceptron,
    "dense": Dense,
    "skips": Skips,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_module_and_its_host_have_the_same_logits(name: str, tmp_path: Path) -> None:
    module, x = warmed(NETWORKS[name]()), images()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    mode, hidden = module.training, torch.get_rng_state()
    host, weights = host_of(module, x)
    assert module.training == mode and torch.equal(hidden, torch.get_rng_state())
    after = module.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert weights.tensors.keys() == before.keys()
    assert all((weights.tensors[key] == tensor.numpy()).all() for key, tensor in before.items())
    weights.save(tmp_path / "w.safetensors")
    compare(module, host, meristem.weights.load(tmp_path / "w.safetensors"), x)
    assert isinstance(host.layers[-1], layers.Linear) and host.layers[-1].out == "classes"


def test_a_module_of_vectors(tmp_path: Path) -> None:
    module = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    x = torch.randn(5, 6)
    host, weights = host_of(module.eval(), x, slots=["2"])
    assert kinds(host.layers)[:2] == [layers.Flatten, layers.Linear]
    compare(module, host, weights, x)
    path = tmp_path / "vectors.safetensors"
    weights.save(path)
    data = tmp_path / "data.npz"
    np.savez(data, train_inputs=np.random.rand(64, 6), train_labels=np.arange(64) % 3)
    run = meristem.train(
        dataset="arrays", data_root=data, host=host, init=path, envs=1, steps=1, batch=8,
        controller="none", run_dir=tmp_path / "run",
    )  # fmt: skip
    trained = meristem.torch.load(next((run.path / "weights").glob("*.safetensors")))
    assert trained(x).shape == (5, 3)


def test_residual_blocks_become_residual_layers() -> None:
    host, _ = host_of(ResNet(), images(1), slots=["layer1", "layer2.0"])
    stem = [layers.Conv2d, layers.BatchNorm, layers.ReLU]
    block = [layers.Residual, layers.ReLU]
    stages = [*block, *block, layers.Slot, *block, layers.Slot, *block]
    assert kinds(host.layers) == [*stem, *stages, layers.GlobalAvgPool, layers.Linear]
    plain, _, projected, _ = (x for x in host.layers if isinstance(x, layers.Residual))
    assert kinds(plain.body) == [*stem, layers.Conv2d, layers.BatchNorm] and not plain.shortcut
    assert kinds(projected.shortcut) == [layers.Conv2d, layers.BatchNorm]
    assert projected.shortcut[0].name == "layer2.0.downsample.0"
    assert [layer.name for layer in host.layers if isinstance(layer, layers.Slot)] == [
        "layer1",
        "layer2_0",
    ]
    assert repr(host).startswith("Host('{") and host.summary((3, 32, 32)).name == "ResNet"


def test_values_that_do_not_nest_are_saved() -> None:
    host, _ = host_of(Skips(), images(1))
    found = host.layers
    residual = next(layer for layer in found if isinstance(layer, layers.Residual))
    assert layers.Save("tanh") in residual.body and layers.Join("tanh", join="add") in found
    assert found[-3].branches == [[], []]


ACTIVATIONS: list[tuple[Any, type[layers.Layer]]] = [
    (nn.ReLU(), layers.ReLU), (F.relu, layers.ReLU), (torch.relu, layers.ReLU),
    (lambda x: x.relu(), layers.ReLU), (lambda x: F.relu(x, inplace=True), layers.ReLU),
    (lambda x: x.relu_(), layers.ReLU),
    (nn.Sigmoid(), layers.Sigmoid), (torch.sigmoid, layers.Sigmoid), (F.sigmoid, layers.Sigmoid),
    (lambda x: x.sigmoid(), layers.Sigmoid),
    (nn.Tanh(), layers.Tanh), (torch.tanh, layers.Tanh), (F.tanh, layers.Tanh),
    (lambda x: x.tanh(), layers.Tanh),
    (nn.LeakyReLU(0.3), layers.LeakyReLU), (F.leaky_relu, layers.LeakyReLU),
    (lambda x: F.leaky_relu(x, 0.3), layers.LeakyReLU),
    (nn.ELU(), layers.ELU), (F.elu, layers.ELU),
    (nn.GELU(), layers.GELU), (F.gelu, layers.GELU),
    (nn.GELU("tanh"), layers.GELUTanh), (lambda x: F.gelu(x, approximate="tanh"), layers.GELUTanh),
    (nn.SiLU(), layers.SiLU), (F.silu, layers.SiLU),
    (nn.Softplus(), layers.Softplus), (F.softplus, layers.Softplus),
    (nn.Hardswish(), layers.HardSwish), (F.hardswish, layers.HardSwish),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ACTIVATIONS)))
def test_every_form_of_an_activation(number: int) -> None:
    given, kind = ACTIVATIONS[number]
    parts = {"act": given} if isinstance(given, nn.Module) else {}

    def forward(self: Any, x: Any) -> Any:
        act = self.act if parts else given
        return self.fc(act(self.conv(x)).flatten(1))

    module = Fn(forward, conv=conv(3, 2), fc=nn.Linear(2 * 8 * 8, 5), **parts)
    x = images(2, side=8)
    host, weights = host_of(module, x)
    assert kinds(host.layers) == [layers.Conv2d, kind, layers.Flatten, layers.Linear]
    compare(module, host, weights, x)


def head(pool: Callable[[Any], Any]) -> nn.Module:
    """A module that pools two channels of 12 rows and columns, and flattens them."""
    with torch.no_grad():
        width = pool(torch.zeros(2, 2, 12, 12)).flatten(1).shape[1]

    def forward(self: Any, x: Any) -> Any:
        return self.fc(pool(self.conv(x)).flatten(1))

    return Fn(forward, conv=conv(3, 2), fc=nn.Linear(width, 5))


POOLS: list[tuple[Callable[[Any], Any], list[layers.Layer]]] = [
    (lambda x: F.max_pool2d(x, 2), [layers.MaxPool2d(2)]),
    (lambda x: F.max_pool2d(x, (3, 2), stride=(2, 1), padding=(1, 0)),
     [layers.MaxPool2d((3, 2), (2, 1), (1, 0))]),
    (lambda x: torch.max_pool2d(x, 3, 1), [layers.MaxPool2d(3, 1)]),
    (lambda x: F.avg_pool2d(x, 3, 2, 1), [layers.AvgPool2d(3, 2, 1)]),
    (lambda x: F.avg_pool2d(x, 4, count_include_pad=False), [layers.AvgPool2d(4)]),
    (lambda x: F.adaptive_avg_pool2d(x, 1), [layers.GlobalAvgPool()]),
    (lambda x: F.adaptive_avg_pool2d(x, (4, 6)), [layers.AvgPool2d((3, 2))]),
    (lambda x: F.adaptive_avg_pool2d(x, (12, None)), []),
    (lambda x: F.adaptive_max_pool2d(x, 1), [layers.GlobalMaxPool()]),
    (lambda x: x.mean((2, 3)), [layers.GlobalAvgPool()]),
    (lambda x: torch.mean(x, dim=(-2, -1), keepdim=True), [layers.GlobalAvgPool()]),
    (lambda x: x.amax((3, 2)), [layers.GlobalMaxPool()]),
    (lambda x: x.reshape(x.shape[0], -1), [layers.Flatten()]),
    (lambda x: torch.reshape(x, (-1, 288)), [layers.Flatten()]),
    (lambda x: x.contiguous().view(x.size(0), -1), [layers.Flatten()]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(POOLS)))
def test_every_form_of_a_pool(number: int) -> None:
    pool, wanted = POOLS[number]
    module, x = head(pool), images(2, side=12)
    host, weights = host_of(module, x)
    found = [layer for layer in host.layers[1:-1] if layer != layers.Flatten() or layer in wanted]
    for layer in found:
        layer.name = None
    assert found == wanted
    compare(module, host, weights, x)


def test_convolutions_keep_their_geometry() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 6, (2, 5), stride=(1, 2), padding=(0, 3), groups=3),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2),
        nn.Conv2d(6, 6, 2, padding="same", dilation=2, bias=False),
        nn.Conv2d(6, 4, 3, padding=0),
        nn.AdaptiveAvgPool2d(1),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4, 7),
    )
    x = images(2, side=16)
    host, weights = host_of(module, x)
    first, second, third, fourth, *_ = host.layers
    assert (first.kernel, first.stride, first.padding, first.groups) == ((2, 5), (1, 2), (0, 3), 3)
    assert (second.padding, second.dilation, second.bias) == ("same", 2, True)
    assert (third.padding, third.bias, fourth.padding) == (1, False, "valid")
    compare(module, host, weights, x)


class Random(nn.Module):
    """Convolutions, sums, products, concatenations and gates of random earlier values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw, channels = np.random.default_rng(seed), [3]
        self.convs, self.steps = nn.ModuleDict(), []
        for i in range(int(draw.integers(3, 12))):
            # Mostly one of the last values.
            a, b, c = (len(channels) - 1 - min(int(n), len(channels) - 1)
                       for n in draw.exponential(1.5, 3))  # fmt: skip
            alike = [j for j, n in enumerate(channels) if n == channels[a]]
            names = ["conv", "add", "multiply", "concat", "gate"]
            kind = draw.choice(names, p=[0.5, 0.15, 0.1, 0.15, 0.1])
            if kind == "conv":
                self.convs[str(i)] = conv(channels[a], 4, int(draw.choice([1, 3])))
            if kind == "gate":
                self.convs[str(i)] = conv(channels[b], channels[a], 1)
            reads = {"conv": [a], "gate": [a, b], "concat": [a, b, c]}
            reads = reads.get(kind, [a, int(draw.choice(alike))])
            self.steps.append((kind, str(i), reads))
            channels.append({"conv": 4, "concat": sum(channels[j] for j in reads)}.get(
                kind, channels[a]))  # fmt: skip
        self.fc = nn.Linear(channels[-1], 5)

    def forward(self, x: Any) -> Any:
        values = [x]
        for kind, name, reads in self.steps:
            first, *others = (values[j] for j in reads)
            match kind:
                case "conv":
                    values.append(torch.tanh(self.convs[name](first)))
                case "add":
                    values.append(first + others[0])
                case "multiply":
                    values.append(first * others[0])
                case "gate":
                    pooled = others[0].mean((2, 3), keepdim=True)
                    values.append(torch.sigmoid(self.convs[name](pooled)) * first)
                case _:
                    values.append(torch.cat([first, *others], 1))
        return self.fc(values[-1].mean((2, 3)))


def test_random_graphs_are_hosts() -> None:
    loads = gates = 0
    for seed in range(80):
        module, x = Random(seed), images(2, side=6)
        host, weights = host_of(module, x)
        compare(module, host, weights, x)
        loads += '"load"' in host.description
        gates += "sigmoid" in host.description
    # Most graphs nest: branches and joins describe them without loads.
    assert 5 < loads < 40 and gates > 20, (loads, gates)


def test_twenty_steps_are_those_of_pytorch(tmp_path: Path) -> None:
    """With tanh, because rounding that moves a value across the corner of ReLU changes a gradient
    as a whole: there PyTorch's own losses in float32 are up to 1e-2 from those in float64."""
    module, exact = ResNet(1, 4, nn.Tanh), ResNet(1, 4, nn.Tanh)
    run = follow(tmp_path, module, exact, slots=["layer1"])
    trained = meristem.torch.load(run.weights(0)).state_dict()
    # The module with the trained weights has the engine's results.
    module.load_state_dict(trained)
    module.float().eval()
    batches = meristem.GatherBatches(meristem.Dataset(split="test"), 500, shuffle=False)
    loss, count = 0.0, 0
    for [batch] in batches.epoch(0):
        x, y = torch.from_dlpack(batch.inputs), torch.from_dlpack(batch.targets).long()
        with torch.no_grad():
            loss += float(F.cross_entropy(module(x), y, reduction="sum"))
        count += len(y)
    # As in test_network.py.
    assert run.summary["envs"][0]["test_loss"] == pytest.approx(loss / count, abs=1e-5)


def test_modules_grow_in_the_slots_of_a_module(tiny: dict[str, Any], tmp_path: Path) -> None:
    host, weights = host_of(ResNet(1, 4), images(1, 1, 28), slots=["layer1", "layer2"])
    weights.save(tmp_path / "w.safetensors")
    run = meristem.train(**{**tiny, "host": host, "init": tmp_path / "w.safetensors"},
                         controller="random")  # fmt: skip
    assert run.summary["status"] == "completed"
    trained = meristem.weights.load(run.weights(0)).metadata["topology"]["slots"]
    empty = weights.metadata["topology"]["slots"]
    assert [slot["slot"] for slot in trained] == [slot["slot"] for slot in empty]
    assert [slot["slot"] for slot in empty] == ["layer1", "layer2"]


def test_a_slot_may_be_after_the_images() -> None:
    parts = [nn.Identity(), nn.Flatten(), nn.Linear(192, 5)]
    host, _ = host_of(nn.Sequential(*parts), images(1, side=8), slots=iter(["0"]))
    assert host.layers[0] == layers.Slot("0") and kinds(host.layers[1:]) == [
        layers.Flatten,
        layers.Linear,
    ]


def test_dropout_is_a_layer_in_training_mode() -> None:
    def forward(self: Any, x: Any) -> Any:
        x = F.dropout(self.a(x).relu(), 0.25, training=self.training)
        return self.fc(self.drop(x.flatten(1)))

    module = Fn(forward, a=conv(3, 4), drop=nn.Dropout(0.1), fc=nn.Linear(4 * 64, 5))
    host, weights = host_of(module.train(), images(2, side=8))
    found = [layer.p for layer in host.layers if isinstance(layer, layers.Dropout)]
    assert found == [0.25, 0.1]
    back = meristem.torch.load(weights)
    x = images(2, side=8)
    assert torch.allclose(back(x), module.eval()(x), atol=1e-6)
    torch.manual_seed(1)
    assert not torch.allclose(back.train()(x), back.eval()(x))
    without, _ = host_of(module.eval(), images(2, side=8))
    assert not any(isinstance(layer, layers.Dropout) for layer in without.layers)


def test_the_weights_of_a_module_have_no_constants() -> None:
    _, weights = host_of(simple(lambda self, x: x), images(1, side=8))
    network = meristem.torch.load(weights)
    assert network.classes == [] and network.pixels is None
    with pytest.raises(errors.WeightsError, match="no `normalization`"):
        network.normalized(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "hosts.md").read_text()
    found = re.search(r"<!-- needs: torch -->\n```python\n(.*?)```", page, re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(compile(found[1], "docs/hosts.md", "exec"), names)
    assert names["run"].summary["status"] == "completed"
