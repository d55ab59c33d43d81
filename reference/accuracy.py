"""Test accuracy, epoch by epoch, of a bare host on CIFAR-10 kept as class folders.

    python reference/accuracy.py --data DIR [--host baseline] [--epochs 10] [--seed 0] [--clip 1]

The recipe: batch 128, SGD lr .01, momentum .9, weight decay 5e-4, gradients clipped to norm 1 (0:
no clipping), no augmentation, images normalised by the training set's mean and deviation.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import PRESETS, CnnHost, make_host
from PIL import Image
from torch import Tensor

BATCH = 128
SUFFIXES = {".jpg", ".jpeg", ".png"}


def load(split: Path) -> tuple[Tensor, Tensor]:
    """u8 images [N, H, W, 3] and labels [N]; classes and files in order of their names."""
    classes = sorted(p for p in split.iterdir() if p.is_dir())
    images, labels = [], []
    for label, folder in enumerate(classes):
        for path in sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES):
            images.append(np.asarray(Image.open(path).convert("RGB")))
            labels.append(label)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel of u8 images, from exact counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack(
        [torch.bincount(images[..., c].flatten(), minlength=256) for c in range(3)]
    )
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    return mean.float(), ((share @ values**2) - mean**2).sqrt().float()


def normalise(images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """f32 [N, 3, H, W] in channels_last from u8 [N, H, W, 3]."""
    return ((images.float() - mean) / deviation).permute(0, 3, 1, 2)


def train_epoch(
    host: CnnHost, sgd: torch.optim.SGD, images: Tensor, labels: Tensor, clip: float
) -> float:
    """One pass in random order, partial last batch dropped; the mean loss."""
    host.train()
    order = torch.randperm(len(images))
    total, batches = 0.0, len(images) // BATCH
    for step in range(batches):
        picks = order[step * BATCH : (step + 1) * BATCH]
        loss = F.cross_entropy(host(images[picks]), labels[picks])
        sgd.zero_grad()
        torch.autograd.backward(loss)
        if clip > 0.0:
            torch.nn.utils.clip_grad_norm_(host.parameters(), clip)
        sgd.step()
        total += loss.item()
    return total / batches


@torch.no_grad()
def accuracy(host: CnnHost, images: Tensor, labels: Tensor) -> float:
    """Share of correct predictions, in percent."""
    host.eval()
    right = 0
    for start in range(0, len(images), 1000):
        answers = host(images[start : start + 1000]).argmax(1)
        right += int((answers == labels[start : start + 1000]).sum())
    return 100.0 * right / len(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and test/")
    parser.add_argument("--host", choices=sorted(PRESETS), default="baseline")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm; 0 for no clipping")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    images, labels = load(args.data / "train")
    test_images, test_labels = load(args.data / "test")
    mean, deviation = moments(images)
    images = normalise(images, mean, deviation)
    test_images = normalise(test_images, mean, deviation)
    print(f"{len(images)} training images, {len(test_images)} test images, seed {args.seed}")

    host = make_host(args.host).to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(host.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        loss = train_epoch(host, sgd, images, labels, args.clip)
        seconds = time.perf_counter() - start
        percent = accuracy(host, test_images, test_labels)
        print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {percent:.2f} %, {seconds:.0f} s",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
