"""PyTorch's time for each block of a host, on one thread: the peer of `cargo bench -p meristem-nn
--bench steps`.

    bench/.venv/bin/python bench/torch_stages.py [--host baseline] [--batch 128]

A block is convolution, batch norm, ReLU and 2x2 max pooling, in channels_last; the head is global average pooling,
the linear layer and the loss. Backward of a block computes the gradients of its parameters and, except in the first
block, of its input. Median of many runs, in microseconds per batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
from common import PRESETS, make_host  # noqa: E402


def microseconds(call: Callable[[], object], seconds: float = 1.0) -> float:
    call()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--host", choices=tuple(PRESETS), default="baseline")
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = make_host(args.host).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (args.batch,))
    x = torch.randn(args.batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def block(i: int, x: Tensor) -> Tensor:
        y: Tensor = host.blocks[i](x)
        return F.max_pool2d(y, 2) if i < host.pools else y

    def head(x: Tensor) -> Tensor:
        return F.cross_entropy(host.classifier(x.mean((2, 3))), labels)

    stages: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        (f"block {i}", lambda x, i=i: block(i, x)) for i in range(len(host.blocks))
    ]
    stages.append(("head", head))
    for mode in ("training", "validation"):
        host.train(mode == "training")
        at = x
        for i, (name, stage) in enumerate(stages):
            if mode == "validation":
                with torch.inference_mode():
                    print(f"{name}, validation {microseconds(lambda: stage(at)):9.0f}")
                    at = stage(at)
                continue
            at = at.detach().requires_grad_(i > 0)
            print(f"{name}, forward    {microseconds(lambda: stage(at)):9.0f}")
            y = stage(at)
            dy = torch.randn_like(y)
            print(f"{name}, backward   {microseconds(lambda: y.backward(dy, retain_graph=True)):9.0f}")
            at = y


if __name__ == "__main__":
    main()
