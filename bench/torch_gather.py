"""PyTorch peer of `meristem bench gather`: microseconds for one batch of 128 images.

Four envs draw batches of normalised f32 images, 3x32x32 in channels_last, from 50,000 u8 images in
random order. (a) `torch.utils.data.DataLoader` over a Dataset that normalises each sample, with 0
and with 2 workers. (b) Indexing a resident tensor: u8 with subsequent normalisation, or
normalised f32, each into a new or a reused tensor; with 1 and with 2 threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

IMAGES, CLASSES, SIDE = 50_000, 10, 32
Batch = tuple[Tensor, Tensor]


class Normalised(Dataset[Batch]):
    """A TensorDataset with a transform: one u8 image, normalised to f32, and its label."""

    def __init__(self, images: Tensor, labels: Tensor, scale: Tensor, shift: Tensor) -> None:
        self.images, self.labels, self.scale, self.shift = images, labels, scale, shift

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        image = self.images[index].float().mul_(self.scale).add_(self.shift)
        return image.permute(2, 0, 1), self.labels[index]


def microseconds(serve: Callable[[], Iterator[Batch]], batches: int, rounds: int) -> float:
    """Median over rounds of the time per batch, without the first two batches of a round."""
    times = []
    for _ in range(rounds):
        source = serve()
        next(source), next(source)
        start = time.perf_counter()
        served = 0
        for served, _batch in enumerate(source, 1):
            if served == batches:
                break
        times.append((time.perf_counter() - start) / served * 1e6)
        del source
    return statistics.median(times)


def loader(data: Normalised, batch: int, workers: int) -> Iterator[Batch]:
    """One loader for all envs, which serves their batches in turn from one permutation."""
    return iter(DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers))


def direct(data: Normalised, batch: int, floats: Tensor | None, reuse: bool) -> Iterator[Batch]:
    """Batches by indexing; `floats` is the normalised resident copy, `None` to index u8."""
    source = data.images if floats is None else floats
    indexed = torch.empty((batch, SIDE, SIDE, 3), dtype=source.dtype) if reuse else None
    images = torch.empty((batch, SIDE, SIDE, 3)) if reuse else None
    for picks in torch.split(torch.randperm(len(data)), batch):
        if len(picks) < batch:
            return
        taken = (
            torch.index_select(source, 0, picks)
            if indexed is None
            else torch.index_select(source, 0, picks, out=indexed)
        )
        if floats is None:
            taken = taken.float() if images is None else images.copy_(taken)
            taken.mul_(data.scale).add_(data.shift)
        yield taken.permute(0, 3, 1, 2), data.labels.index_select(0, picks)


def measure(batch: int, envs: int, rounds: int) -> dict[str, float]:
    source = torch.Generator().manual_seed(0)
    data = Normalised(
        torch.randint(0, 256, (IMAGES, SIDE, SIDE, 3), dtype=torch.uint8, generator=source),
        torch.randint(CLASSES, (IMAGES,), generator=source),
        torch.full((3,), 1.0 / 64.0),
        torch.full((3,), -2.0),
    )
    floats = torch.empty((IMAGES, SIDE, SIDE, 3))
    for start in range(0, IMAGES, 1000):
        floats[start : start + 1000] = data.images[start : start + 1000].float() / 64.0 - 2.0

    found: dict[str, float] = {}
    torch.set_num_threads(1)
    for workers in (0, 2):
        batches = min(32 * envs, IMAGES // batch - 2)
        found[f"dataloader_workers{workers}"] = microseconds(
            partial(loader, data, batch, workers), batches, max(1, rounds // 4)
        )
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for kind, resident in (("u8", None), ("f32", floats)):
            for reuse in (False, True):
                name = f"direct_{kind}_{'reused' if reuse else 'new'}_threads{threads}"
                found[name] = microseconds(
                    partial(direct, data, batch, resident, reuse), IMAGES, rounds
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    found = measure(args.batch, args.envs, args.rounds)
    report = {
        "dataloader_us_per_batch": min(v for k, v in found.items() if k.startswith("dataloader")),
        "direct_us_per_batch": min(v for k, v in found.items() if k.startswith("direct")),
        "direct_u8_us_per_batch": min(v for k, v in found.items() if k.startswith("direct_u8")),
        "batch": args.batch,
        "envs": args.envs,
        "all": {k: round(v, 1) for k, v in found.items()},
        "torch": torch.__version__,
    }
    if args.json:
        print(json.dumps(report))
    else:
        for name, value in found.items():
            print(f"{value:9.1f} us  {name}")


if __name__ == "__main__":
    main()
