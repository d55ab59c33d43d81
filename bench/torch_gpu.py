"""PyTorch peer of `meristem bench host --device cuda:0`, which trains on request.

The workload equals that of `torch_host.py`: independent hosts, resident data, gather by a random
permutation, forward, backward, clip to norm 1, SGD with momentum and decay, nothing read back.

    eager           a CUDA stream for each host
    graphs          like eager, with one CUDA graph for a step of all hosts
    compile         `torch.compile(mode="reduce-overhead")` of each host's forward and backward pass
    compile-graphs  `torch.compile` of both passes, and one CUDA graph for a step of all hosts
    vmap            parameters of all hosts stacked, `torch.func.vmap`
    vmap-graphs     like vmap, with one CUDA graph

After its warm-up the script prints an object with `ready`. For each number of seconds on a line of
stdin it trains that long and prints an object with `images_per_s`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_host import IMAGES, Data, Env, Gather, Job, fastest

LR, MOMENTUM, DECAY = 0.01, 0.9, 5e-4
ARRANGEMENTS = ("eager", "graphs", "compile", "compile-graphs", "vmap", "vmap-graphs")

# A step of all hosts, for indices of images [envs, batch].
Step = Callable[[Tensor], None]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_precision(precision: str, device: torch.device) -> Callable[[], Any]:
    """Sets the rounding of f32 products; returns the context for forward passes."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    if precision == "bf16":
        # Without the cache of cast weights, which a graph must not keep.
        return lambda: torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    return contextlib.nullcontext


def resident(device: torch.device) -> tuple[Data, dict[str, Gather]]:
    """The dataset on the device, as u8 and as normalised f32 images."""
    data = Data(0)
    data.make_floats()
    for name in ("bytes", "labels", "scale", "shift", "floats"):
        setattr(data, name, getattr(data, name).to(device))
    return data, {"u8": data.from_bytes, "f32": data.from_floats}


def choose_gather(data: Data, kinds: dict[str, Gather], args: argparse.Namespace) -> str:
    """The faster gather, measured with images of all hosts."""
    count = min(IMAGES, args.envs * args.batch)
    picks = torch.randperm(IMAGES)[:count].to(args.device)

    def call(gather: Gather) -> None:
        for _ in range(4):
            gather(picks).contiguous()
        synchronize(args.device)

    name = fastest({k: partial(call, gather) for k, gather in kinds.items()}, 5)
    if name != "f32":
        data.floats = None
    return name


def separate(args: argparse.Namespace, gather: Gather, labels: Tensor, loss: Loss) -> Step:
    """Separate hosts, each on a separate stream where the device has streams."""
    job = Job(args.host, args.envs, args.batch, 1, 0.0, True, 0, False)
    envs = [Env(job) for _ in range(args.envs)]
    for env in envs:
        env.host.to(args.device)
        env.use("fused", True)

    def train(env: Env, picks: Tensor) -> None:
        env.sgd.zero_grad()
        torch.autograd.backward(loss(env.host, gather(picks), labels[picks]))
        env.clip()
        env.sgd.step()

    if args.device.type != "cuda":

        def one_by_one(picks: Tensor) -> None:
            for env, part in zip(envs, picks, strict=True):
                train(env, part)

        return one_by_one
    streams = [torch.cuda.Stream() for _ in envs]

    def step(picks: Tensor) -> None:
        main = torch.cuda.current_stream()
        for env, stream, part in zip(envs, streams, picks, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                train(env, part)
        for stream in streams:
            main.wait_stream(stream)

    def in_turn(picks: Tensor) -> None:
        for env, part in zip(envs, picks, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            train(env, part)

    # Graphs that the compiler records belong to one stream.
    return in_turn if args.arrangement == "compile" else step


def stacked(args: argparse.Namespace, gather: Gather, labels: Tensor, cast: Any) -> Step:
    """Stacked parameters [envs, …] of all hosts, with gradients, norms and updates per host."""
    # vmap does not support channels_last.
    job = Job(args.host, args.envs, args.batch, 1, 0.0, False, 0, False)
    hosts = [Env(job).host.to(args.device) for _ in range(args.envs)]
    parameters, buffers = torch.func.stack_module_state(hosts)
    base = copy.deepcopy(hosts[0]).to("meta")
    if args.precision == "bf16":
        # A norm under vmap takes images and statistics of one type only.
        for module in base.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_pre_hook(lambda _, images: (images[0].float(),))
                module.register_forward_hook(lambda _, images, y: y.to(torch.bfloat16))
    values = [value.detach() for value in parameters.values()]
    momenta = [torch.zeros_like(value) for value in values]

    def loss_of(p: Any, b: Any, images: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        b = {name: value.clone() for name, value in b.items()}
        with cast():
            logits = torch.func.functional_call(base, (p, b), (images,))
        return F.cross_entropy(logits.float(), targets), b

    gradients = torch.func.vmap(torch.func.grad(loss_of, has_aux=True))

    def step(picks: Tensor) -> None:
        images = gather(picks.flatten()).contiguous().unflatten(0, picks.shape)
        named = dict(zip(parameters, values, strict=True))
        grads, after = gradients(named, buffers, images, labels[picks])
        torch._foreach_copy_(list(buffers.values()), [after[name] for name in buffers])
        found = [grads[name] for name in parameters]
        norm = sum(g.flatten(1).square().sum(1) for g in found).sqrt()
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        found = [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in found]
        torch._foreach_add_(found, values, alpha=DECAY)
        torch._foreach_mul_(momenta, MOMENTUM)
        torch._foreach_add_(momenta, found)
        torch._foreach_add_(values, momenta, alpha=-LR)

    return step


def captured(step: Step, picks: Tensor) -> Step:
    """The step as one CUDA graph, with a separate copy of the indices."""
    own = picks.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step(own)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(own)

    def replay(picks: Tensor, _keeps_memory: Step = step) -> None:
        # The graph has addresses of the step's data and hosts, but does not own their memory.
        own.copy_(picks)
        graph.replay()

    return replay


class Trainer:
    """Trains over random permutations."""

    def __init__(self, step: Step, args: argparse.Namespace) -> None:
        self.step, self.args = step, args
        self.left: list[Tensor] = []

    def picks(self) -> Tensor:
        if not self.left:
            per_step = self.args.envs * self.args.batch
            order = torch.randperm(IMAGES, device=self.args.device)
            parts = torch.split(order, per_step)[: IMAGES // per_step]
            self.left = [part.view(self.args.envs, self.args.batch) for part in parts]
        return self.left.pop()

    def train(self, steps: int) -> float:
        """Seconds that `steps` steps take, until the device is done."""
        synchronize(self.args.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(self.picks())
        synchronize(self.args.device)
        return time.perf_counter() - start


def make_step(args: argparse.Namespace) -> tuple[Step, str]:
    """The arrangement, and the gather that it chose."""
    cast = use_precision(args.precision, args.device)
    data, kinds = resident(args.device)
    kind = choose_gather(data, kinds, args)

    def loss(host: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with cast():
            logits = host(images)
        return F.cross_entropy(logits.float(), labels)

    form = args.arrangement.removesuffix("-graphs")
    if form == "vmap":
        step = stacked(args, kinds[kind], data.labels, cast)
    elif form == "compile":
        # One compiled code for all hosts, or one recording per host.
        torch._dynamo.config.cache_size_limit = 4 * args.envs + 64
        whole = args.arrangement != "compile" or args.device.type != "cuda"
        compiled = torch.compile(loss, mode=None if whole else "reduce-overhead")
        step = separate(args, kinds[kind], data.labels, compiled)
    else:
        step = separate(args, kinds[kind], data.labels, loss)
    if args.arrangement.endswith("graphs"):
        step = captured(step, Trainer(step, args).picks())
    return step, kind


def ceilings(device: torch.device) -> dict[str, float]:
    """Bytes read and written by a large copy, in GB/s; products of large matrices, in TFLOP/s."""
    large = device.type == "cuda"
    found = {}

    def best(call: Callable[[], Any], work: float) -> float:
        times = []
        for _ in range(12):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times.append(time.perf_counter() - start)
        return work / min(times[2:])

    source = torch.rand((1 << (30 if large else 22),), device=device)
    target = torch.empty_like(source)
    found["copy_GB_per_s"] = best(lambda: target.copy_(source), 8e-9 * source.numel())
    side = 8192 if large else 256
    for precision in ("f32", "tf32", "bf16"):
        use_precision(precision, device)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        a, b = (torch.randn((side, side), device=device, dtype=dtype) for _ in range(2))
        found[f"matmul_{precision}_TFLOP_per_s"] = best(partial(torch.mm, a, b), 2e-12 * side**3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arrangement", choices=ARRANGEMENTS, default="eager")
    parser.add_argument("--precision", choices=("f32", "tf32", "bf16"), default="f32")
    parser.add_argument("--device", type=torch.device, default="cuda")
    hosts = ("baseline", "large", "deep", "minimal")
    parser.add_argument("--host", choices=hosts, default="baseline")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--ceilings", action="store_true", help="measure the device and exit")
    args = parser.parse_args()
    if args.ceilings:
        print(json.dumps(ceilings(args.device)))
        return
    torch.manual_seed(0)
    step, gather = make_step(args)
    trainer = Trainer(step, args)
    trainer.train(5)
    print(json.dumps({"ready": True, "gather": gather, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        steps = max(1, round(float(line) * 4 / trainer.train(4)))
        rate = steps * args.envs * args.batch / trainer.train(steps)
        print(json.dumps({"images_per_s": rate, "steps": steps}), flush=True)


if __name__ == "__main__":
    main()
