"""Growth in width by gromo (TINY, GradMax), beside ours.

    PYTHONPATH=FOLDER python bench/gromo_peer.py --program target/release/meristem \\
        [--tasks embedded] [--width-init zero,gradmax] [--json FILE]

Needs the package meristem for the data, and gromo with torch, numpy. Both train the same network by
SGD with momentum 0.9, weight decay 5e-4, gradients clipped at norm 1 and the rate on half a cosine,
in batches of 128, on 90 % of the training samples.

- `spirals` and `friedman`: `mlp:8,8` for 40 epochs. After epochs 1, 4, 7 and 10 the hidden layers in
  turn get four further features. Ours is `meristem growth bench --methods width`, whose rule skips
  an epoch in which the host overfits.
- `embedded`: four convolutions, the host `CONVOLUTIONS` below, for 20 epochs. After epochs 1, 3, 5
  and 7 the first and the third in turn get four further channels. gromo measures 2,048 images, as
  ours does, and its line search 128 of them: with all 2,048 a growth took five minutes. Ours is
  `meristem train` under a script.

Each way has the best of its rates by the control split, the other 10 %, on other seeds than the
table has. One thread. Seconds are of training and growth; on `embedded` our seconds include the
evaluation of the control split. Our processor time is of the whole command, start and evaluations
included, divided by its runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import resource
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import meristem
import numpy as np
import torch
from gromo.containers.growing_mlp import GrowingMLP
from gromo.modules.conv2d_growing_module import FullConv2dGrowingModule
from gromo.modules.growing_module import GrowingModule
from gromo.utils.utils import line_search
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, MOMENTUM, DECAY, CLIP, CONTROL = 128, 0.9, 5e-4, 1.0, 0.1
WIDTH, FURTHER = 8, 4
FIRST_SEED, FIRST_TUNING_SEED = 1000, 500
# Options of `compute_optimal_updates`, as its documentation names them for the two papers.
WAYS = {
    "TINY": {
        "compute_delta": False, "use_covariance": True, "alpha_zero": False, "omega_zero": False,
        "use_projection": True, "ignore_singular_values": False,
    },
    "GradMax": {
        "compute_delta": False, "use_covariance": False, "alpha_zero": True, "omega_zero": False,
        "use_projection": False, "ignore_singular_values": True,
    },
}  # fmt: skip
# PyTorch's ReLU has the derivative 0 at 0, and GradMax assumes 1: the pre-activations of its new
# features get this bias.
GRADMAX_BIAS = 1e-6


def split_of(task: str, split: str) -> tuple[Tensor, Tensor]:
    """Samples [N, …], normalised, and classes [N] or standardised numbers [N, 1]."""
    data = meristem.Dataset(task, split=split)
    [[(_, x, y)]] = list(meristem.GatherBatches(data, batch=len(data), shuffle=False).epoch(0))
    targets = torch.from_numpy(np.asarray(y).copy())
    return torch.from_numpy(np.asarray(x).copy()), targets.long() if y.dtype == "int32" else targets


class Convolutions(nn.Module):
    """Two pairs of convolutions; between the two of a pair there are only ReLUs. gromo grows there.

    The second of each pair has no bias: with one, gromo 0.1.0 fails at its second growth, because
    the statistics get the shape of a bias for each element of the kernel.
    """

    def __init__(self, channels: int, outputs: int):
        super().__init__()
        conv = functools.partial(
            FullConv2dGrowingModule, kernel_size=3, padding=1, post_layer_function=nn.ReLU()
        )
        a1, b1 = conv(channels, 4, name="a1"), conv(8, 8, name="b1")
        growing = functools.partial(conv, use_bias=False, allow_growing=True)
        a2 = growing(4, 8, previous_module=a1, name="a2")
        b2 = growing(8, 16, previous_module=b1, name="b2")
        self.convolutions = nn.ModuleList([a1, a2, b1, b2])
        self.pool, self.classifier = nn.MaxPool2d(2), nn.Linear(16, outputs)

    def pairs(self) -> list[tuple[GrowingModule, GrowingModule]]:
        a1, a2, b1, b2 = self.convolutions
        return [(a1, a2), (b1, b2)]

    def forward(self, x: Tensor) -> Tensor:
        a1, a2, b1, b2 = self.convolutions
        return self.classifier(b2(b1(self.pool(a2(a1(x))))).mean((2, 3)))

    def extended_forward(self, x: Tensor) -> Tensor:
        a1, a2, b1, b2 = self.convolutions
        x, _ = a2.extended_forward(*a1.extended_forward(x))
        x, _ = b2.extended_forward(*b1.extended_forward(self.pool(x)))
        return self.classifier(x.mean((2, 3)))


CONVOLUTIONS = """name = "pairs"
layers = [
  { conv2d = { out = 4, kernel = 3, bias = true, name = "a1" } }, "relu",
  { conv2d = { out = 8, kernel = 3, name = "a2" } }, "relu", { max_pool2d = { kernel = 2 } },
  { conv2d = { out = 8, kernel = 3, bias = true, name = "b1" } }, "relu",
  { conv2d = { out = 16, kernel = 3, name = "b2" } }, "relu",
  "global_avg_pool", { linear = { out = "classes" } },
]
"""


class Mlp(GrowingMLP):
    def __init__(self, features: int, outputs: int):
        super().__init__(features, outputs, WIDTH, 2, activation=nn.ReLU(), device=torch.device("cpu"))

    def pairs(self) -> list[tuple[GrowingModule, GrowingModule]]:
        return list(zip(self.layers, self.layers[1:], strict=False))


@dataclass
class Task:
    model: Callable[[int, int], nn.Module]
    epochs: int
    # Epochs, from 0, after which a layer grows.
    growths: tuple[int, ...]
    # Training samples that gromo measures, and samples of its line search; None for all.
    measured: int | None = None
    searched: int | None = None


TASKS = {
    "spirals": Task(Mlp, 40, (0, 3, 6, 9)),
    "friedman": Task(Mlp, 40, (0, 3, 6, 9)),
    "embedded": Task(Convolutions, 20, (0, 2, 4, 6), measured=2048, searched=128),
}


def loss_of(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    loss = F.mse_loss if y.is_floating_point() else F.cross_entropy
    return loss(logits, y, reduction=reduction)


@torch.no_grad()
def score_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy, or R²."""
    logits = model(x)
    if y.is_floating_point():
        return float(1 - (logits - y).square().sum() / (y - y.mean()).square().sum())
    return float((logits.argmax(1) == y).float().mean())


def grow(model: nn.Module, pair: int, way: str, x: Tensor, y: Tensor, searched: slice) -> None:
    """Four further features of a layer, by statistics over these samples.

    As gromo's own loops do, these take the sum of the losses of a batch. gromo finds at most as many
    features as its matrix has significant singular values. The others begin as with our `zero`:
    PyTorch's initial incoming weights, and outgoing weights of 0. So are all if the line search of
    TINY finds that each amplitude makes the loss larger: features whose weights are all 0 would
    never learn.
    """
    before, after = model.pairs()[pair]
    after.init_computation()
    for part in torch.split(torch.arange(len(x)), BATCH):
        model.zero_grad(set_to_none=True)
        loss_of(model(x[part]), y[part], "sum").backward()
        after.update_computation()
    after.compute_optimal_updates(maximum_added_neurons=FURTHER, **WAYS[way])
    after.reset_computation()
    found = 0 if after.eigenvalues_extension is None else len(after.eigenvalues_extension)
    if way == "GradMax" and found > 0:
        after.normalize_optimal_updates(normalization_type="gradmax_normalization")
    factor = 1.0
    if way == "TINY" and found > 0:

        @torch.no_grad()
        def cost(factor: float) -> float:
            after.input_extension_scaling = before.output_extension_scaling = float(factor)
            return loss_of(model.extended_forward(x[searched]), y[searched]).item()

        factor = float(line_search(cost)[0])
    if factor > 0 and found > 0:
        after.apply_change(
            apply_delta=False, input_extension_scaling=factor, output_extension_scaling=factor
        )
    else:
        found = 0
    after.delete_update()
    if way == "GradMax" and found > 0:
        before.layer.bias.data[-found:] = GRADMAX_BIAS
    if found < FURTHER:
        (outputs, _, *kernel), n = after.weight.shape, FURTHER - found
        if kernel:
            fresh: nn.Module = nn.Conv2d(before.weight.shape[1], n, kernel)
        else:
            fresh = nn.Linear(before.weight.shape[1], n)
        before.layer_out_extension(weight=fresh.weight.data, bias=fresh.bias.data)
        after.layer_in_extension(weight=torch.zeros(outputs, n, *kernel))


def optimiser(model: nn.Module, rate: float, old: dict[str, Tensor]) -> torch.optim.SGD:
    """SGD whose momenta are the old ones, and 0 for further features."""
    sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=DECAY)
    for name, p in model.named_parameters() if old else []:
        momentum = torch.zeros_like(p)
        momentum[tuple(slice(n) for n in old[name].shape)] = old[name]
        sgd.state[p]["momentum_buffer"] = momentum
    return sgd


def momenta_of(model: nn.Module, sgd: torch.optim.SGD) -> dict[str, Tensor]:
    return {name: sgd.state[p]["momentum_buffer"] for name, p in model.named_parameters()}


def train(task: str, way: str, rate: float, seed: int) -> dict[str, float]:
    """One run of gromo."""
    torch.manual_seed(seed)
    settings = TASKS[task]
    x, y = split_of(task, "train")
    order = torch.randperm(len(x))
    control, rest = order[: round(len(x) * CONTROL)], order[round(len(x) * CONTROL) :]
    x_control, y_control, x, y = x[control], y[control], x[rest], y[rest]
    outputs = 1 if y.is_floating_point() else int(y.max()) + 1
    model = settings.model(x.shape[1], outputs)
    start, start_cpu, growing = time.perf_counter(), time.process_time(), 0.0
    sgd = optimiser(model, rate, {})
    for epoch in range(settings.epochs):
        for group in sgd.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * epoch / settings.epochs))
        for picks in torch.split(torch.randperm(len(x)), BATCH):
            sgd.zero_grad(set_to_none=True)
            loss_of(model(x[picks]), y[picks]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            sgd.step()
        if epoch in settings.growths:
            begun, momenta = time.perf_counter(), momenta_of(model, sgd)
            measured, pair = slice(settings.measured), settings.growths.index(epoch) % 2
            grow(model, pair, way, x[measured], y[measured], slice(settings.searched))
            sgd = optimiser(model, rate, momenta)
            growing += time.perf_counter() - begun
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    score = score_of(model, *split_of(task, "test"))
    return {
        "seed": seed, "test_score": score, "control_score": score_of(model, x_control, y_control),
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds,
        "cpu_seconds": cpu, "growth_seconds": growing,
    }  # fmt: skip


def tuned(
    run: Callable[[float, int], dict[str, float]], given: argparse.Namespace
) -> dict[str, Any]:
    """Runs of the table, with the rate that is best on the tuning seeds by the control split."""
    rates = [float(rate) for rate in given.rates.split(",")]
    control = {
        rate: statistics.mean(
            run(rate, FIRST_TUNING_SEED + i)["control_score"] for i in range(given.tuning_seeds)
        )
        for rate in rates
    }
    finite = {rate: score for rate, score in control.items() if not math.isnan(score)}
    rate = max(finite, key=lambda rate: finite[rate])
    runs = [run(rate, FIRST_SEED + i) for i in range(given.seeds)]
    return {"lr": rate, "control_by_rate": control, "runs": runs}


def of_gromo(task: str, way: str, given: argparse.Namespace) -> dict[str, Any]:
    return tuned(functools.partial(train, task, way), given)


def of_our_script(task: str, width_init: str, given: argparse.Namespace) -> dict[str, Any]:
    """Our runs of the task with convolutions."""
    settings = TASKS[task]
    with tempfile.TemporaryDirectory() as folder:
        host, script = Path(folder, "host.toml"), Path(folder, "script.jsonl")
        host.write_text(CONVOLUTIONS)
        layers = ["a1", "b1"] * 2
        actions = [{"step": step, "op": "WIDEN", "layer": layer, "by": FURTHER}
                   for step, layer in zip(settings.growths, layers, strict=True)]  # fmt: skip
        script.write_text("".join(json.dumps(action) + "\n" for action in actions))

        def run(rate: float, seed: int) -> dict[str, float]:
            out = Path(folder, f"{rate}-{seed}")
            command = [
                given.program, "train", "--quiet", "--host", str(host), "--dataset", task,
                "--controller", f"fixed:{script}", "--width-init", width_init, "--envs", "1",
                "--twin", "off", "--augment", "none", "--steps", str(settings.epochs),
                "--lr", str(rate), "--lr-schedule", "cosine", "--seed", str(seed), "--threads", "1",
                "--run-dir", str(out),
            ]  # fmt: skip
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            summary = json.loads((out / "summary.json").read_text())
            [env] = summary["envs"]
            return {
                "seed": seed, "test_score": env["test_accuracy"],
                "control_score": env["control_accuracy"], "parameters": env["parameters"],
                "seconds": summary["step_seconds_total"],
                "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            }  # fmt: skip

        return tuned(run, given)


def of_our_bench(task: str, width_init: str, given: argparse.Namespace) -> dict[str, Any]:
    """The same of `meristem growth bench --methods width`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            given.program, "growth", "bench", "--json", "--quiet", "--tasks", task, "--methods", "width",
            "--seeds", str(given.seeds), "--tuning-seeds", str(given.tuning_seeds), "--rates", given.rates,
            "--threads", "1", "--set", f"width-init={width_init}", "--run-dir", f"{folder}/bench",
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    [found] = json.loads(done.stdout)["tasks"][0]["methods"]
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    each = used / (given.seeds + given.tuning_seeds * len(given.rates.split(",")))
    runs = [{**run, "cpu_seconds": each} for run in found["runs"]]
    return {"lr": found["lr"], "tuning": found["tuning"], "runs": runs}


# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12,
       2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04)  # fmt: skip


def line(task: str, name: str, found: dict[str, Any]) -> str:
    scores = [run["test_score"] for run in found["runs"]]
    n = len(scores)
    half = T95[min(n - 2, 29)] * statistics.stdev(scores) / math.sqrt(n) if n > 1 else math.nan
    seconds, cpu = ([run[key] for run in found["runs"]] for key in ("seconds", "cpu_seconds"))
    return (
        f"| {task} | {name} | {found['lr']} | {n} | {statistics.mean(scores):.4f} ± {half:.4f} "
        f"| {statistics.median(scores):.4f} | {found['runs'][0]['parameters']:.0f} "
        f"| {statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f}) "
        f"| {statistics.median(cpu):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default="target/release/meristem")
    parser.add_argument("--width-init", default="zero,net2wider", help="of ours, a list; or none")
    parser.add_argument("--ways", default="TINY,GradMax", help="of gromo, a list; or none")
    parser.add_argument("--rates", default="0.05,0.1,0.2,0.3,0.5")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tuning-seeds", type=int, default=4)
    parser.add_argument("--tasks", default="spirals,friedman", help=f"a list of {', '.join(TASKS)}")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print("| task | way | rate | seeds | test score | median | parameters | seconds | cpu |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    results: dict[str, Any] = {"versions": {name: version(name) for name in ("gromo", "torch")}}
    for task in given.tasks.split(","):
        ways = [] if given.ways == "none" else given.ways.split(",")
        inits = [] if given.width_init == "none" else given.width_init.split(",")
        named = [(f"gromo, {way}", of_gromo, way) for way in ways]
        ours = of_our_script if task == "embedded" else of_our_bench
        named += [(f"ours, {init}", ours, init) for init in inits]
        for name, function, value in named:
            found = function(task, value, given)
            results.setdefault(task, {})[name] = found
            print(line(task, name, found), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
