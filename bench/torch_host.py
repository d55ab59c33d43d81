"""PyTorch peer of `meristem bench host`: images/s of training or validating N independent hosts.

Eager PyTorch, channels_last, a resident dataset of 50,000 images of 3x32x32 in 10 classes, gather
included: index by a random permutation, forward, backward, clip to norm 1, SGD (momentum .9, weight
decay 5e-4). The envs take turns within a process. Nothing is read back in the loop.

With --loader the batches come from a `DataLoader` over a Dataset that normalises each sample, in the
process that trains.

With --modules the hosts have live modules, in the syntax of `meristem bench host`. The input of a
module is detached. In stage training its output passes a straight-through estimator, in holding it
is blended by alpha. Each module is clipped separately and has no weight decay.

PyTorch uses its fastest variant: the warm-up measures whether f32 images or u8 images normalised
after indexing are faster, and the implementations of SGD and of clipping.

An arrangement PxT is P processes with T threads each. The envs are divided over the processes,
which start together at a barrier; their rates over the same window are added.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_gather import Normalised
from torch_models import model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
from blueprints import join, layers_of  # noqa: E402
from common import PRESETS, CnnHost, make_host  # noqa: E402

IMAGES, CLASSES, SIDE = 50_000, 10, 32
ARRANGEMENTS = ("1x1", "1x2", "2x1")
# Arguments of torch.optim.SGD that select an implementation.
SGD_KINDS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
}


@dataclass(frozen=True)
class Job:
    """The work of one process."""

    host: str
    envs: int
    batch: int
    threads: int
    seconds: float
    channels_last: bool
    seed: int
    validate: bool
    modules: str = ""
    compiled: bool = False
    loader: bool = False


class Data:
    """The resident images, u8 NHWC, and on demand their normalised f32 form."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        shape = (IMAGES, SIDE, SIDE, 3)
        self.bytes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)
        self.labels = torch.randint(CLASSES, (IMAGES,), generator=source)
        self.scale = torch.full((3,), 1.0 / 64.0)
        self.shift = torch.full((3,), -2.0)
        self.floats: Tensor | None = None

    def make_floats(self) -> None:
        self.floats = torch.empty(self.bytes.shape)
        for start in range(0, IMAGES, 1000):
            part = self.bytes[start : start + 1000].float()
            self.floats[start : start + 1000] = part.mul_(self.scale).add_(self.shift)

    def from_bytes(self, picks: Tensor) -> Tensor:
        images = self.bytes.index_select(0, picks).float()
        return images.mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)

    def from_floats(self, picks: Tensor) -> Tensor:
        assert self.floats is not None
        return self.floats.index_select(0, picks).permute(0, 3, 1, 2)


Gather = Callable[[Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


def batches_of(job: Job, data: Data, gather: Gather) -> Iterator[Batch]:
    """Whole batches in random order, epoch after epoch."""
    samples = Normalised(data.bytes, data.labels, data.scale, data.shift)
    while True:
        if job.loader:
            yield from DataLoader(samples, batch_size=job.batch, shuffle=True, drop_last=True)
        else:
            for picks in torch.split(torch.randperm(IMAGES), job.batch)[: IMAGES // job.batch]:
                yield gather(picks), data.labels[picks]


class Module(nn.Module):
    """A blueprint's layers in a slot of `channels` channels, in stage training or holding."""

    def __init__(self, blueprint: str, channels: int, training: bool) -> None:
        super().__init__()
        self.blueprint, self.straight_through = blueprint, training
        self.layers = layers_of(blueprint, channels)
        self.tensors = nn.ModuleList(
            nn.ParameterDict({name: torch.randn(shape) / 10 for name, shape in layer.shapes.items()})
            for layer in self.layers
        )
        self.mix = nn.ParameterDict({"mix": torch.full((1,), 0.7)} if blueprint == "norm" else {})
        self.alpha = torch.ones(())

    def forward(self, host: Tensor) -> Tensor:
        x = y = host.detach()
        for layer, tensors in zip(self.layers, self.tensors, strict=True):
            y = layer.apply(y, dict(tensors.items()))
        y = join(self.blueprint, x, y, dict(self.mix.items()))
        return host + (y - y.detach()) if self.straight_through else host + self.alpha * (y - host)


class GrownHost(nn.Module):
    """A host with modules in slots: `r0c{i}` before the pool of block i, `r1c{i}` after it."""

    def __init__(self, host: CnnHost, modules: str) -> None:
        super().__init__()
        self.host, self.grown = host, nn.ModuleDict()
        for entry in filter(None, modules.split(",")):
            slot, what = entry.split("=")
            blueprint, _, stage = what.partition(":")
            channels = host.blocks[int(slot[3:])].conv.out_channels
            self.grown[slot] = Module(blueprint, channels, stage == "training")

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.host.blocks):
            x = block(x)
            for row in (0, 1):
                if f"r{row}c{i}" in self.grown:
                    x = self.grown[f"r{row}c{i}"](x)
                if row == 0 and i < self.host.pools:
                    x = F.max_pool2d(x, 2)
        logits: Tensor = self.host.classifier(x.mean((2, 3)))
        return logits


def make(job: Job) -> nn.Module:
    if job.host not in PRESETS:
        return model(job.host)
    host = make_host(job.host)
    return GrownHost(host, job.modules) if job.modules else host


class Env:
    """One host and its optimiser."""

    def __init__(self, job: Job) -> None:
        self.host: nn.Module = make(job)
        self.channels_last = job.channels_last
        if job.channels_last:
            self.host = self.host.to(memory_format=torch.channels_last)
        grown = isinstance(self.host, GrownHost)
        own: nn.Module = self.host.host if grown else self.host
        modules = self.host.grown.values() if grown else ()
        # Each group is clipped separately.
        self.groups = [list(part.parameters()) for part in (own, *modules)]
        if job.compiled:
            self.host = torch.compile(self.host)
        self.use("fused", True)

    def use(self, kind: str, clip_foreach: bool) -> None:
        """Selects the implementations, and resets the momentum."""
        self.clip_foreach = clip_foreach
        groups = [
            {"params": group, "weight_decay": 0.0 if i else 5e-4} for i, group in enumerate(self.groups)
        ]
        self.sgd = torch.optim.SGD(groups, lr=0.01, momentum=0.9, **SGD_KINDS[kind])

    def clip(self) -> None:
        for group in self.groups:
            nn.utils.clip_grad_norm_(group, 1.0, foreach=self.clip_foreach)

    def step(self, images: Tensor, labels: Tensor) -> None:
        if not self.channels_last:
            images = images.contiguous()
        loss = F.cross_entropy(self.host(images), labels)
        self.sgd.zero_grad()
        torch.autograd.backward(loss)
        self.clip()
        self.sgd.step()


class Validation:
    """One host in validation: sums of losses and of hits, not read back in the loop. Not compiled."""

    def __init__(self, job: Job) -> None:
        self.host: nn.Module = make(job).eval()
        self.channels_last = job.channels_last
        if job.channels_last:
            self.host = self.host.to(memory_format=torch.channels_last)
        self.loss = torch.zeros((), dtype=torch.float64)
        self.hits = torch.zeros((), dtype=torch.int64)

    def step(self, images: Tensor, labels: Tensor) -> None:
        with torch.inference_mode():
            if not self.channels_last:
                images = images.contiguous()
            logits = self.host(images)
            self.loss += F.cross_entropy(logits, labels, reduction="sum")
            self.hits += (logits.argmax(1) == labels).sum()


def fastest(candidates: dict[str, Callable[[], None]], repeats: int) -> str:
    """The candidate with the smallest minimum over `repeats` times, measured in turns."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(repeats):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return min(best, key=lambda name: best[name])


def choose_gather(data: Data, batch: int) -> tuple[str, Gather]:
    data.make_floats()
    picks = torch.split(torch.randperm(IMAGES)[: batch * 64], batch)
    kinds: dict[str, Gather] = {"u8": data.from_bytes, "f32": data.from_floats}

    def run(gather: Gather) -> None:
        for part in picks:
            gather(part)

    name = fastest({k: partial(run, g) for k, g in kinds.items()}, 5)
    if name != "f32":
        data.floats = None
    return name, kinds[name]


def choose_update(env: Env, images: Tensor, labels: Tensor) -> tuple[str, bool]:
    """The fastest SGD and clipping after a real backward pass."""
    times: dict[tuple[str, bool], float] = {}
    for kind in SGD_KINDS:
        for clip_foreach in (True, False):
            env.use(kind, clip_foreach)
            env.step(images, labels)

            def update() -> None:
                env.clip()
                env.sgd.step()

            best = float("inf")
            for _ in range(30):
                start = time.perf_counter()
                update()
                best = min(best, time.perf_counter() - start)
            times[kind, clip_foreach] = best
    return min(times, key=lambda key: times[key])


def work(job: Job, barrier: Barrier | None, results: Any) -> None:
    """Warms up, waits for the others, trains for `seconds` and reports its rate."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    data = Data(job.seed)
    gather_kind, gather = choose_gather(data, job.batch)
    picks = torch.randperm(IMAGES)[: job.batch]
    envs: list[Env] | list[Validation]
    if job.validate:
        sgd_kind, clip_foreach = "", False
        envs = [Validation(job) for _ in range(job.envs)]
    else:
        envs = [Env(job) for _ in range(job.envs)]
        sgd_kind, clip_foreach = choose_update(envs[0], gather(picks), data.labels[picks])
        for env in envs:
            env.use(sgd_kind, clip_foreach)
    for env in envs:
        for _ in range(5):
            env.step(gather(picks), data.labels[picks])

    batches = batches_of(job, data, gather)
    if barrier is not None:
        barrier.wait()
    start = time.perf_counter()
    steps = 0
    while (elapsed := time.perf_counter() - start) < job.seconds:
        for env in envs:
            env.step(*next(batches))
        steps += 1
    results.put(
        {
            "images_per_s": steps * job.envs * job.batch / elapsed,
            "steps": steps,
            "seconds": elapsed,
            "gather": "loader" if job.loader else gather_kind,
            "sgd": sgd_kind,
            "clip_foreach": clip_foreach,
        }
    )


def run(job: Job, processes: int) -> list[dict[str, Any]]:
    """One report per process. Processes are spawned, so that none inherits a used thread pool."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(processes)
    results = context.Queue()
    shares = [job.envs // processes + (i < job.envs % processes) for i in range(processes)]
    workers = []
    for i, share in enumerate(shares):
        part = Job(**{**vars(job), "envs": share, "seed": job.seed + i})
        workers.append(context.Process(target=work, args=(part, barrier, results), daemon=True))
        workers[-1].start()
    reports = [results.get(timeout=120 + 4 * job.seconds) for _ in workers]
    for worker in workers:
        worker.join()
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--host", required=True, help="a preset, or a host of torch_models.py")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--arrangement", choices=ARRANGEMENTS, default="1x1")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--format", choices=("channels_last", "nchw"), default="channels_last")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate", action="store_true", help="forward, loss and hits only")
    parser.add_argument("--modules", default="", help="such as r0c0=conv_heavy,r0c1=depthwise:training")
    parser.add_argument("--compile", action="store_true", help="torch.compile, its default mode")
    parser.add_argument("--loader", action="store_true", help="batches from a DataLoader")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    processes, threads = map(int, args.arrangement.split("x"))
    job = Job(
        args.host, args.envs, args.batch, threads, args.seconds,
        args.format == "channels_last", args.seed, args.validate, args.modules, args.compile,
        args.loader,
    )  # fmt: skip
    if args.envs < processes:
        parser.error("--envs must be at least the number of processes")
    reports = run(job, processes)
    report = {
        "images_per_s": round(sum(r["images_per_s"] for r in reports), 1),
        "host": args.host,
        "modules": args.modules,
        "compiled": args.compile,
        "work": "validation" if args.validate else "training",
        "envs": args.envs,
        "batch": args.batch,
        "arrangement": args.arrangement,
        "format": args.format,
        "loader": args.loader,
        "processes": reports,
        "torch": torch.__version__,
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(f"{report['images_per_s']:,.0f} images/s ({args.host}, {args.arrangement})")


if __name__ == "__main__":
    main()
