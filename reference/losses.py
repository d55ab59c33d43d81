"""Writes golden/losses.safetensors: losses other than plain cross-entropy, forward and backward,
with the sums of their scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import GoldenFile, Tensors, generator
from torch import Tensor

golden = GoldenFile("losses", "reference/losses.py: losses and the sums of their scores")

#: Samples and outputs.
SHAPES = [(1, 1), (3, 2), (5, 17), (7, 100), (67, 10)]


def randn(case: str, shape: tuple[int, int], scale: float) -> Tensor:
    return scale * torch.randn(shape, generator=generator(case))


def binary() -> None:
    for batch, outputs in SHAPES:
        # Logits up to about 100, where `1 - sigmoid` is 0 in f32.
        for scale in (1.0, 30.0):
            for kind in ("hard", "soft"):
                case = f"binary_cross_entropy_{batch}x{outputs}_scale{scale:.0f}_{kind}"
                targets = torch.rand((batch, outputs), generator=generator(case + "/targets"))
                inputs = {
                    "values": randn(case, (batch, outputs), scale),
                    "targets": targets.round() if kind == "hard" else targets,
                }

                def forward(t: Tensors) -> Tensors:
                    loss = F.binary_cross_entropy_with_logits(t["values"], t["targets"])
                    predicted, present = t["values"] > 0, t["targets"] > 0.5
                    counts = [predicted & present, predicted & ~present, ~predicted & present]
                    sums = torch.stack([count.sum() for count in counts])
                    return {"loss": loss[None], "counts": sums.to(t["values"].dtype)}

                golden.add(
                    case, "binary_cross_entropy", inputs, forward,
                    grads=("values",), through="loss", reduction="mean",
                )  # fmt: skip


def numbers() -> None:
    functions: list[tuple[str, dict[str, float], Callable[[Tensor, Tensor], Tensor]]] = [
        ("mse", {}, F.mse_loss),
        ("l1", {}, F.l1_loss),
        ("huber", {"delta": 1.0}, lambda y, t: F.huber_loss(y, t, delta=1.0)),
        ("huber", {"delta": 0.25}, lambda y, t: F.huber_loss(y, t, delta=0.25)),
    ]
    for op, settings, function in functions:
        for batch, outputs in SHAPES:
            case = f"{op}_{batch}x{outputs}" + "".join(f"_{v}" for v in settings.values())
            values = randn(case, (batch, outputs), 2.0)
            targets = randn(case + "/targets", (batch, outputs), 1.0)
            # Some differences are exactly 0.
            targets.view(-1)[::5] = values.view(-1)[::5]

            def forward(t: Tensors) -> Tensors:
                y, targets = t["values"], t["targets"]
                return {
                    "loss": function(y, targets)[None],
                    "residual_squares": ((y - targets) ** 2).sum()[None],
                    "target_squares": ((targets - targets.mean(0)) ** 2).sum()[None],
                }

            golden.add(
                case, op, {"values": values, "targets": targets}, forward,
                grads=("values",), through="loss", reduction="mean", **settings,
            )  # fmt: skip


def cross_entropy() -> None:
    """Means over the samples. (`reduction="mean"` divides by the sum of the samples' weights.)"""
    for batch, classes in SHAPES:
        for scale in (1.0, 30.0):
            for smoothing, weighted in [(0.1, False), (0.0, True), (0.3, True), (1.0, False)]:
                case = f"cross_entropy_{batch}x{classes}_scale{scale:.0f}_s{smoothing}"
                case += "_weighted" if weighted else ""
                labels = torch.randint(classes, (batch,), generator=generator(case + "/labels"))
                inputs = {"values": randn(case, (batch, classes), scale), "labels": labels.float()}
                if weighted:
                    weights = torch.rand((classes,), generator=generator(case + "/weights"))
                    inputs["weights"] = 3.0 * weights

                def forward(t: Tensors) -> Tensors:
                    labels = t["labels"].long()
                    loss = F.cross_entropy(
                        t["values"], labels, t.get("weights"),
                        reduction="none", label_smoothing=smoothing,
                    )  # fmt: skip
                    correct = (t["values"].argmax(1) == labels).sum()
                    return {"loss": loss.mean()[None], "correct": correct.to(loss.dtype)[None]}

                golden.add(
                    case, "cross_entropy", inputs, forward,
                    grads=("values",), through="loss", reduction="mean of none",
                    label_smoothing=smoothing,
                )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for section in (binary, numbers, cross_entropy):
        section()
    golden.write()
