"""Writes golden/host_<preset>.safetensors: the first SGD steps of whole hosts.

Images are u8, and x = u8 / 128 - 1 is exact in f32, so both sides train on the same numbers. Each
class has a distinct smooth pattern under noise, so that the loss can fall.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import SEED, GoldenFile, Tensors, generator, make_host
from torch import Tensor, nn

STEPS, BATCH, CLASSES = 20, 8, 10
LR, MOMENTUM, WEIGHT_DECAY, CLIP_NORM = 0.01, 0.9, 5e-4, 1.0
# preset: (image side, distinct batches). Step t trains on batch t mod distinct batches; `deep` has
# few, because its weights, stored twice, already take most of a megabyte.
HOSTS = {"baseline": (16, 20), "deep": (32, 4), "minimal": (16, 20)}


def make_data(preset: str, rows: int, side: int, batches: int) -> tuple[Tensor, Tensor]:
    """u8 images [batches, BATCH, 3, rows, side] and u8 labels [batches, BATCH]."""
    source = generator(preset)
    labels = torch.randint(CLASSES, (batches, BATCH), generator=source)
    coarse = torch.randn((CLASSES, 3, 4, 4), generator=source)
    patterns = F.interpolate(coarse, size=(rows, side), mode="bilinear")
    noise = torch.randn((batches, BATCH, 3, rows, side), generator=source)
    images = 128.0 + 45.0 * patterns[labels] + 30.0 * noise
    return images.round().clamp(0, 255).to(torch.uint8), labels.to(torch.uint8)


def train(host: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> list[float]:
    """The losses of STEPS steps, each before its update; afterwards `host` has the final weights."""
    host.to(dtype).train()
    sgd = torch.optim.SGD(host.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(STEPS):
        batch = step % len(images)
        logits = host(images[batch].to(dtype) / 128.0 - 1.0)
        loss = F.cross_entropy(logits, labels[batch].long())
        sgd.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(host.parameters(), CLIP_NORM)
        sgd.step()
        losses.append(loss.item())
    return losses


def state(host: nn.Module) -> Tensors:
    return {k: v.detach().clone().contiguous() for k, v in host.state_dict().items()}


def relative(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, by L2 norms."""
    distance = torch.linalg.vector_norm(got.double() - want.double())
    return float(f"{distance / torch.linalg.vector_norm(want.double()).clamp(min=1e-12):.1e}")


def write(preset: str, side: int, batches: int) -> None:
    torch.manual_seed(SEED)
    recipe = "reference/hosts.py: the first SGD steps of a host"
    write_host(preset, lambda: make_host(preset), side, batches, recipe, preset=preset)


def write_host(
    name: str,
    make: Callable[[], nn.Module],
    side: int,
    batches: int,
    recipe: str,
    *,
    rows: int | None = None,
    **metadata: Any,
) -> None:
    """`rows` is 1 for signals; images are square."""
    host = make()
    init = state(host)
    images, labels = make_data(name, rows or side, side, batches)
    losses = train(host, images, labels, torch.float32)
    final = state(host)

    exact = make()
    exact.load_state_dict(init)
    exact_losses = train(exact, images, labels, torch.float64)
    loss_error = max(abs(a - b) / abs(b) for a, b in zip(losses, exact_losses, strict=True))
    error = {k: relative(final[k], v) for k, v in exact.state_dict().items()}

    file = GoldenFile(f"host_{name}", recipe)
    file.tensors = {
        "images": images,
        "labels": labels,
        "losses": torch.tensor(losses),
        **{f"init/{k}": v for k, v in init.items()},
        **{f"final/{k}": v for k, v in final.items()},
    }
    file.write(
        **metadata,
        steps=STEPS,
        distinct_batches=batches,
        batch_of_step="step mod distinct_batches",
        input="x = u8 / 128 - 1, f32, NCHW",
        loss="mean softmax cross-entropy of the batch, before the update",
        optimiser={"kind": "sgd", "lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
        clip="gradients * min(1, clip_norm / (norm + 1e-6)), all parameters as one group",
        clip_norm=CLIP_NORM,
        torch_error={"loss_relative": float(f"{loss_error:.1e}"), "final_relative_l2": error},
    )
    print(f"  loss {losses[0]:.4f} -> {losses[-1]:.4f}; against f64: loss {loss_error:.1e},"
          f" weights {max(error.values()):.1e}")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (image_side, distinct) in HOSTS.items():
        write(name, image_side, distinct)
