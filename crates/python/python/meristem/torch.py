"""Grown networks as PyTorch modules, and PyTorch modules as hosts. Requires ``torch``."""

import json
import re
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import _meristem, network
from ._arguments import refused, sequence
from ._forward import EPS, Size, forward, pair
from ._nesting import nested
from ._trace import copied, refusal, traced
from .errors import SettingError, WeightsError
from .hosts import Host
from .network import as_images, input_kind, normalization, read, topology_of
from .weights import Weights

#: Suffixes of tensors that are buffers, not parameters.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
#: Largest difference between the logits of a module and of its host, relative to the largest logit:
#: rounding of float32 in deep networks is about 1e-5, another function differs by more.
LOGITS_DIFFERENCE_MAX = 1e-3


class Network(nn.Module):
    """A grown network.

    Its ``state_dict`` has the names of the weights file. In training mode batch norm uses the
    statistics of the batch, and all modules train with their host, at constant alpha.
    """

    def __init__(self, weights: Weights) -> None:
        """Creates a network with copies of the weights."""
        super().__init__()
        self.host, self.topology = network.host_of(weights), topology_of(weights)
        #: Names of the classes; empty if the weights have none, as after :func:`host_of`.
        self.classes: list[str] = weights.metadata.get("classes", [])
        #: Kind of the samples: ``image``, ``signal`` or ``vector``.
        self.kind = input_kind(weights)
        #: Mean and standard deviation per channel of the stored values, where bytes count as 0..1;
        #: ``None`` if the weights have none.
        self.pixels = normalization(weights) if "normalization" in weights.metadata else None
        #: Task: ``classify``, ``multilabel`` or ``regress``; and mean and standard deviation of the
        #: targets, if the outputs are standardised numbers.
        self.task, self.scale = network.task_of(weights)
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

    def forward(self, samples: Tensor) -> Tensor:
        """The outputs (N, K): logits of classes or labels, or standardised numbers.

        The samples are normalised images (N, C, H, W), signals (N, C, L) or vectors (N, F).
        """
        x = as_images(self.kind, samples)
        logits: Tensor = forward(self, self.host, self.topology, x)
        return logits

    def predictions(self, outputs: Tensor) -> Tensor:
        """Predictions from outputs (N, K) of :meth:`forward`: probabilities of the classes, the
        probability of each label, or numbers in the units of the targets, float64.

        Raises:
            WeightsError: The outputs have another shape.
        """
        network.check_outputs(tuple(outputs.shape), len(self.classes))
        if self.task == "multilabel":
            return outputs.sigmoid()
        if self.scale is not None:
            # Float32 would lose small deviations beside a large mean, as those of times in seconds.
            mean, std = (torch.tensor(x, dtype=torch.float64, device=outputs.device) for x in self.scale)
            return outputs.double() * std + mean
        return outputs if self.task == "regress" else outputs.softmax(dim=1)

    def normalized(self, samples: Tensor) -> Tensor:
        """Normalises samples of these shapes as in training; uint8 as 0..1.

        Raises:
            WeightsError: The weights have no constants.
        """
        if self.pixels is None:
            remedy = "normalise the samples as those that the weights were trained on"
            raise WeightsError("the weights have no `normalization`", remedy=remedy)
        values = samples.float() / 255 if samples.dtype == torch.uint8 else samples.float()
        axes = [1] * (samples.ndim - 2)
        mean, std = (torch.tensor(x, device=samples.device).view(-1, *axes) for x in self.pixels)
        return (values - mean) / std

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
        """The elementwise product."""
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
        """``x`` times the distribution function of the standard normal distribution at ``x``."""
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

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Dropout in training mode, with PyTorch's draws."""
        return functional.dropout(x, p, self.training)


def load(weights: "str | PathLike[str] | Weights") -> Network:
    """The network of a weights file, in evaluation mode.

    Raises:
        WeightsError: The file cannot be read, or was not written by meristem.
    """
    return Network(read(weights)).eval()


def host_of(module: nn.Module, example: Tensor, slots: Iterable[str] = ()) -> tuple[Host, Weights]:
    """A module as a host, and its weights, which the setting ``init`` reads from a file.

    The module is traced by ``torch.fx``. Its tensors keep their names. `docs/hosts.md` lists what
    layers stand for; everything else is refused with its place. The module is not changed. Parts on
    which the logits do not depend are left out.

    Args:
        module: Returns the logits (N, classes) of samples. Its last linear layer gets as many
            outputs as a dataset has classes.
        example: Normalised images (N, C, H, W), signals (N, C, L) or vectors (N, F) in float32, on
            the module's device.
        slots: Paths of submodules with a slot after each, such as ``layer1.0``. The slot has the
            name of the path with ``_`` for ``.``.

    Raises:
        SettingError: No layers stand for a part of the module, or the host would compute something
            else.
    """
    if not isinstance(module, nn.Module):
        raise refused("module", module, "a torch.nn.Module", SettingError)
    _check_example(example)
    paths = sequence("slots", slots, "paths of submodules", SettingError)
    found = traced(module, example, paths)
    name = re.sub(r"[^A-Za-z0-9_-]", "_", type(module).__name__)
    host = Host(*nested(found.values), name=name)
    sample = tuple(example.shape[1:])
    summary = host.summary(input=sample, classes=found.classes)
    kind = {1: "vector", 2: "signal", 3: "image"}[len(sample)]
    image = as_images(kind, example).shape[1:]
    value = json.loads(_meristem.host_json(host.description))
    # The slots are empty, and enabled.
    slot = {"stage": "dormant", "stage_steps": 0}
    topology = {
        "version": 1,
        "host": host.description,
        "image": dict(zip(("channels", "height", "width"), image, strict=True))
        | {"classes": found.classes},
        "blueprints": [],
        "slots": [{"slot": name, **slot} for name in value["slots"]],
    }
    metadata = {"format": "pt", "host": value, "topology": topology}
    if kind != "image":
        metadata["inputs"] = {"kind": kind, "stored": "f32"}
    weights = Weights(found.tensors, metadata)
    _check_logits(module, weights, example, summary.parameters)
    return host, weights


def _check_example(example: object) -> None:
    """Checks that an example has images, signals or vectors."""
    got = type(example).__name__
    if isinstance(example, Tensor):
        if example.dim() in (2, 3, 4) and example.numel() and example.dtype == torch.float32:
            return
        got = f"{tuple(example.shape)} of {example.dtype}"
    expected = "at least one image (N, C, H, W), signal (N, C, L) or vector (N, F) in float32"
    raise refusal("`example`", got, expected, "give normalised samples, such as those of a batch")


def _check_logits(module: nn.Module, weights: Weights, example: Tensor, parameters: int) -> None:
    """Compares a module with its host on the example, both in evaluation mode."""
    own = copied(module).eval()
    host = Network(weights).eval().to(example.device)
    with torch.no_grad():
        wanted = own(example.clone())
        difference = float((host(example) - wanted).abs().max())
    scale = float(wanted.abs().max())
    trained = sum(parameter.numel() for parameter in host.parameters())
    if not difference <= LOGITS_DIFFERENCE_MAX * scale or trained != parameters:
        got = f"logits that differ from those of its layers by {difference:.1e} of {scale:.1e}"
        expected = "the same logits"
        remedy = (
            "remove hooks, do not change a tensor in place that is used again, and give"
            " `training=self.training` to functions of dropout"
        )
        raise refusal(f"`{type(module).__name__}`", got, expected, remedy)
