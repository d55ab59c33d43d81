"""Common parts of the golden scripts: seeded tensors, the `cnn` host, and the writer of golden files.

A golden case is a function from named inputs to named outputs. It runs twice: in f32, for the
values in the file, and in f64 from the same f32 inputs, to measure the error of PyTorch's f32
result. The metadata has this error as `torch_error`, so that a test can derive its tolerance.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SEED = 20250301
GOLDEN_DIR = Path(__file__).resolve().parent.parent / "golden"

Tensors = dict[str, Tensor]


def generator(name: str) -> torch.Generator:
    """A generator keyed by the case's name, so that a new case does not change the others."""
    return torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))


@dataclass
class GoldenFile:
    """Collects cases and writes one `golden/<name>.safetensors`."""

    name: str
    recipe: str
    tensors: Tensors = field(default_factory=dict)
    cases: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        case: str,
        op: str,
        inputs: Tensors,
        forward: Callable[[Tensors], Tensors],
        *,
        grads: tuple[str, ...] = (),
        through: str = "y",
        **params: Any,
    ) -> None:
        """Runs one case forward and, where `grads` names inputs, backward from output `through`."""
        assert all(existing["case"] != case for existing in self.cases), f"{case} twice"
        probe = forward(inputs)[through]
        grad_out = torch.randn(probe.shape, generator=generator(case + "/grad_out"))
        if through == "loss":
            grad_out = torch.ones(probe.shape)

        single = _run(inputs, forward, grads, through, grad_out, torch.float32)
        double = _run(inputs, forward, grads, through, grad_out, torch.float64)
        error = {k: float(f"{(single[k].double() - double[k]).abs().max():.1e}") for k in single}
        self.cases.append({"case": case, "op": op, **params, "torch_error": error})

        stored = {f"in.{k}": v for k, v in inputs.items()} | single
        if grads:
            stored[f"grad_out.{through}"] = grad_out
        for key, value in stored.items():
            self.tensors[f"{case}/{key}"] = value.to(torch.float32).contiguous().clone()

    def write(self, **metadata: Any) -> None:
        """Writes the file; metadata values that are not text are stored as JSON."""
        entries: dict[str, Any] = {
            "recipe": self.recipe,
            "torch": torch.__version__.split("+")[0],
            "seed": SEED,
            **({"cases": self.cases} if self.cases else {}),
            **metadata,
        }
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in entries.items()}
        path = GOLDEN_DIR / f"{self.name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(self.tensors, path, metadata=text)
        _sort_metadata(path)
        print(f"{path.name}: {path.stat().st_size:,} bytes, {len(self.tensors)} tensors")


def _sort_metadata(path: Path) -> None:
    """safetensors writes metadata in a random order; sorted, a rerun gives the same bytes."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    compact = json.dumps(header, separators=(",", ":")).encode()
    compact += b" " * (-len(compact) % 8)
    path.write_bytes(len(compact).to_bytes(8, "little") + compact + content[end:])
    path.chmod(0o644)


def _run(
    inputs: Tensors,
    forward: Callable[[Tensors], Tensors],
    grads: tuple[str, ...],
    through: str,
    grad_out: Tensor,
    dtype: torch.dtype,
) -> Tensors:
    """Outputs as `out.<name>` and gradients as `grad.<name>`, computed in `dtype`."""
    leaves = {k: v.to(dtype, copy=True).requires_grad_(k in grads) for k, v in inputs.items()}
    outputs = forward(leaves)
    if grads:
        torch.autograd.backward(outputs[through], grad_out.to(dtype))
    result = {f"out.{k}": v.detach() for k, v in outputs.items()}
    for name in grads:
        gradient = leaves[name].grad
        assert gradient is not None, f"no gradient reached {name}"
        result[f"grad.{name}"] = gradient
    return result


@dataclass(frozen=True)
class HostShape:
    """A `cnn` host: block i has `channels * 2**i` outputs; 2x2 pool after block i < pools."""

    channels: int
    blocks: int
    kernel: int
    pools: int


PRESETS = {
    "baseline": HostShape(channels=8, blocks=3, kernel=3, pools=3),
    "wide": HostShape(channels=16, blocks=3, kernel=3, pools=3),
    "deep": HostShape(channels=8, blocks=5, kernel=3, pools=5),
    "large": HostShape(channels=32, blocks=3, kernel=3, pools=3),
    "minimal": HostShape(channels=2, blocks=3, kernel=1, pools=0),
}
# Parameters with 3 input channels and 10 classes.
PARAMETERS = {"baseline": 6_418, "wide": 24_346, "deep": 99_922, "large": 94_762, "minimal": 164}


class Block(nn.Module):
    """conv k x k, same padding, no bias -> batch norm -> ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.bn(self.conv(x)))


class CnnHost(nn.Module):
    """The host network, with PyTorch's default initialisation and the names of its state_dict."""

    def __init__(self, shape: HostShape, inputs: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.pools = shape.pools
        widths = [inputs] + [shape.channels * 2**i for i in range(shape.blocks)]
        self.blocks = nn.ModuleList(Block(a, b, shape.kernel) for a, b in pairwise(widths))
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < self.pools:
                x = nn.functional.max_pool2d(x, 2)
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


def make_host(preset: str) -> CnnHost:
    """A host of the preset; checks its parameter count against the table."""
    host = CnnHost(PRESETS[preset])
    count = sum(p.numel() for p in host.parameters())
    assert count == PARAMETERS[preset], f"{preset}: {count} parameters"
    return host
