"""Parts of PyTorch modules that no layer stands for. Needs PyTorch, which is not part of CI."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F

from host_of_modules import Fn, conv, images, simple

from meristem import errors
from meristem.torch import host_of


def branching(self: Any, x: Any) -> Any:
    return x if x.sum() > 0 else -x


def tied() -> nn.Module:
    module = simple(lambda self, x: self.b(self.a(x)), a=conv(4, 4), b=conv(4, 4))
    module.b.weight = module.a.weight
    return module


def hooked() -> nn.Module:
    module = simple(lambda self, x: x)
    module.conv.register_forward_hook(lambda part, given, output: output * 2)
    return module


def changed(self: Any, x: Any) -> Any:
    y = F.relu(x, inplace=True)
    return self.a(y) + x


REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "control flow": (lambda: simple(branching), ["TraceError", "without `if`", "test_host_of_refusals.py:"]),
    "length": (lambda: simple(lambda self, x: x * len(x)), ["expected a forward", "help: write"]),
    "called twice": (lambda: simple(lambda self, x: self.a(self.a(x)), a=conv(4, 4)),
                     ["`a` (test_host_of_refusals.py:", "`a.weight` used twice"]),
    "tied": (tied, ["`b` (", "`b.weight`, which is `a.weight`"]),
    "function": (lambda: simple(lambda self, x: torch.exp(x)),
                 ["`exp` (test_host_of_refusals.py:", "an unsupported function", "docs/hosts.md"]),
    "method": (lambda: simple(lambda self, x: x.abs()), ["`abs` (", "an unsupported method"]),
    "module": (lambda: simple(lambda self, x: self.a(x), a=nn.ReLU6()),
               ["`a` (", "an unsupported module ReLU6"]),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(8, 4)), ["`0`: ", "an unsupported module LSTM"]),
    "parameter": (lambda: simple(lambda self, x: x * self.conv.weight.mean()),
                  ["`conv.weight`", "the tensor `conv.weight` itself"]),
    "scalar": (lambda: simple(lambda self, x: x + 1),
               ["1 as an operand", "a tensor of the network"]),
    "alpha": (lambda: simple(lambda self, x: torch.add(x, x, alpha=2)),
              ["alpha=2, expected alpha=1"]),
    "cat of rows": (lambda: simple(lambda self, x: torch.cat([x, x], 2)), ["`cat`", "dim=1"]),
    "padding mode": (
        lambda: simple(lambda self, x: self.a(x), a=nn.Conv2d(4, 4, 3, padding_mode="reflect")),
        ["`a` (", "padding_mode='reflect', expected padding_mode='zeros'"]),
    "even same": (lambda: simple(lambda self, x: self.a(x), a=nn.Conv2d(4, 4, 2, padding="same")),
                  ["padding='same' of a 2×2 kernel"]),
    "indices": (lambda: simple(lambda self, x: F.max_pool2d(x, 2, return_indices=True)[0]),
                ["return_indices=True, expected return_indices=False"]),
    "indices of a module": (
        lambda: simple(lambda self, x: self.a(x)[0], a=nn.MaxPool2d(2, return_indices=True)),
        ["`a` (", "return_indices=True"]),
    "ceil": (lambda: simple(lambda self, x: self.a(x), a=nn.MaxPool2d(3, ceil_mode=True)),
             ["ceil_mode=True, expected ceil_mode=False"]),
    "ceil of a mean": (lambda: simple(lambda self, x: F.avg_pool2d(x, 3, ceil_mode=True)),
                       ["ceil_mode=True, expected ceil_mode=False"]),
    "pool dilation": (lambda: simple(lambda self, x: F.max_pool2d(x, 2, dilation=2)),
                      ["dilation=2, expected dilation=1"]),
    "pad count": (lambda: simple(lambda self, x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
                  ["count_include_pad=False, expected count_include_pad=True"]),
    "divisor": (lambda: simple(lambda self, x: F.avg_pool2d(x, 2, divisor_override=3)),
                ["divisor_override=3"]),
    "adaptive": (lambda: simple(lambda self, x: F.adaptive_avg_pool2d(x, 5)),
                 ["8×8 pixels to 5×5", "divides"]),
    "mean of rows": (lambda: simple(lambda self, x: x.mean(2, keepdim=True)), ["dim=2, expected"]),
    "pooled": (lambda: simple(lambda self, x: F.avg_pool2d(x.mean((2, 3), keepdim=True), 1)),
               ["`avg_pool2d` (", "a pooled image, expected an image"]),
    "momentum": (lambda: simple(lambda self, x: self.a(x), a=nn.BatchNorm2d(4, momentum=None)),
                 ["momentum=None, expected momentum=0.1"]),
    "small momentum": (
        lambda: simple(lambda self, x: self.a(x), a=nn.BatchNorm2d(4, momentum=0.01)),
        ["momentum=0.01"]),
    "eps": (lambda: simple(lambda self, x: self.a(x), a=nn.BatchNorm2d(4, eps=1e-3)),
            ["eps=0.001, expected eps=1e-05"]),
    "group eps": (lambda: simple(lambda self, x: self.a(x), a=nn.GroupNorm(2, 4, eps=1e-3)),
                  ["eps=0.001, expected eps=1e-05"]),
    "statistics": (
        lambda: simple(lambda self, x: self.a(x), a=nn.BatchNorm2d(4, track_running_stats=False)),
        ["track_running_stats=False"]),
    "affine": (lambda: simple(lambda self, x: self.a(x), a=nn.BatchNorm2d(4, affine=False)),
               ["affine=False"]),
    "elu": (lambda: simple(lambda self, x: F.elu(x, 0.5)), ["alpha=0.5, expected alpha=1.0"]),
    "softplus": (lambda: simple(lambda self, x: F.softplus(x, beta=2)),
                 ["beta=2, expected beta=1"]),
    "dropout of channels": (lambda: simple(lambda self, x: self.a(x), a=nn.Dropout2d(0.5)),
                            ["`a` (", "Dropout2d in training mode", "module.eval()"]),
    "functional dropout of channels": (lambda: simple(lambda self, x: F.dropout2d(x, 0.5)),
                                       ["dropout2d in training mode", "single elements"]),
    "dropout in evaluation": (lambda: simple(lambda self, x: F.dropout(x, 0.5)),
                              ["logits that differ", "training=self.training"]),
    "all dropped": (lambda: simple(lambda self, x: self.a(x), a=nn.Dropout(1.0)),
                    ["`a` (", "p=1.0", "from 0 to below 1"]),
    "type": (lambda: simple(lambda self, x: x).double(), ["`conv` (", "`weight` of torch.float64"]),
    "half": (lambda: simple(lambda self, x: x).bfloat16(), ["`weight` of torch.bfloat16"]),
    "shape": (lambda: simple(lambda self, x: self.a(x), a=conv(5, 4)),
              ["`a` (", "RuntimeError", "expected a result for the example"]),
    "fixed batch": (lambda: Fn(lambda self, x: self.fc(x.view(2, -1)), fc=nn.Linear(192, 5)),
                    ["the fixed size 2 of a batch", "x.flatten(1)"]),
    "mixed batch": (lambda: Fn(lambda self, x: self.fc(x.reshape(-1, 64)), fc=nn.Linear(64, 5)),
                    ["(2, 3, 8, 8) as (6, 64)", "an image as a vector"]),
    "linear of an image": (lambda: Fn(lambda self, x: self.fc(x), fc=nn.Linear(8, 5)),
                           ["a tensor of shape (2, 3, 8, 8), expected vectors (N, F)"]),
    "image output": (lambda: Fn(lambda self, x: self.a(x), a=conv(3, 4)),
                     ["an output of shape (2, 4, 8, 8), expected logits (2, classes)"]),
    "two outputs": (lambda: Fn(lambda self, x: (self.a(x), x), a=conv(3, 4)), ["as an operand"]),
    "hook": (hooked, ["logits that differ from those of its layers", "remove hooks"]),
    "in place": (lambda: simple(changed, a=conv(4, 4)), ["logits that differ", "in place"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_layer_is_refused_with_its_place(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(errors.SettingError) as raised:
        host_of(make(), images(2, side=8))
    text = str(raised.value)
    assert [word for word in words if word not in text] == [], text
    assert raised.value.exit_code == 2 and raised.value.remedy
    assert text.endswith(f"  help: {raised.value.remedy}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"module": F.relu}, "`module`: got <function"),
        ({"example": np.zeros((1, 3, 8, 8))}, "`example`: got ndarray, expected at least one"),
        ({"example": (2, 3, 4, 4, 4)}, "`example`: got (2, 3, 4, 4, 4) of torch.float32"),
        ({"example": (0, 3, 8, 8)}, "`example`: got (0, 3, 8, 8)"),
        ({"slots": ["other"]}, "`slots`: got 'other', which has 0 outputs"),
        ({"slots": "conv"}, "`slots`: got 'conv', expected paths of submodules"),
        ({"slots": ["conv", "conv"]}, "two slots have the name `conv`"),
        ({"slots": ["aside"]}, "`slots`: got 'aside', whose output is not used"),
    ],
)
def test_arguments_are_checked(change: dict[str, Any], words: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        self.aside(x)
        return x

    given: dict[str, Any] = {"module": simple(forward, aside=conv(4, 4)), "example": (2, 3, 8, 8)}
    given |= change
    if isinstance(given["example"], tuple):
        given["example"] = torch.zeros(given["example"])
    with pytest.raises(errors.SettingError) as raised:
        host_of(**given)
    assert words in str(raised.value)
