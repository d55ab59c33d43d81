"""JAX peer of `meristem bench host --device cuda:0`, which trains on request.

The workload equals that of `torch_host.py`. Parameters of all hosts are stacked and trained by
`vmap`; `scan` compiles several steps, gather included, into one program with donated state. The
protocol equals that of `torch_gpu.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from itertools import pairwise
from typing import Any

IMAGES, CLASSES, SIDE = 50_000, 10, 32
LR, MOMENTUM, DECAY = 0.01, 0.9, 5e-4
# Channels of the first block, and blocks with a pool; kernels of 3x3, as in reference/common.py.
HOSTS = {"baseline": (8, 3), "deep": (8, 5), "large": (32, 3)}
# Steps of one program.
STEPS = 8
EPS, RUNNING = 1e-5, 0.1


def initial(key: Any, host: str) -> tuple[Any, Any]:
    """Parameters of one host in PyTorch's default initialisation, and running statistics."""
    from jax import random

    first, count = HOSTS[host]
    widths = [3] + [first * 2**i for i in range(count)]
    blocks, statistics = [], []
    for inputs, outputs in pairwise(widths):
        key, own = random.split(key)
        bound = (9 * inputs) ** -0.5
        kernel = random.uniform(own, (3, 3, inputs, outputs), minval=-bound, maxval=bound)
        blocks.append({"kernel": kernel, "gamma": jnp.ones(outputs), "beta": jnp.zeros(outputs)})
        statistics.append({"mean": jnp.zeros(outputs), "var": jnp.ones(outputs)})
    bound, (one, two) = widths[-1] ** -0.5, random.split(key)
    weight = random.uniform(one, (widths[-1], CLASSES), minval=-bound, maxval=bound)
    bias = random.uniform(two, (CLASSES,), minval=-bound, maxval=bound)
    return {"blocks": blocks, "weight": weight, "bias": bias}, statistics


def forward(parameters: Any, statistics: Any, images: Any, dtype: Any) -> tuple[Any, Any]:
    """Logits of images [batch, height, width, channels], and the new running statistics."""
    x, after = images.astype(dtype), []
    for block, running in zip(parameters["blocks"], statistics, strict=True):
        numbers = ("NHWC", "HWIO", "NHWC")
        kernel = block["kernel"].astype(dtype)
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        wide = x.astype(jnp.float32)
        mean, var = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        unbiased = var * (wide[..., 0].size / (wide[..., 0].size - 1))
        new = {"mean": mean, "var": unbiased}
        after.append({k: (1 - RUNNING) * running[k] + RUNNING * new[k] for k in running})
        wide = (wide - mean) * lax.rsqrt(var + EPS) * block["gamma"] + block["beta"]
        x = jnp.maximum(wide, 0).astype(dtype)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    pooled = x.astype(jnp.float32).mean((1, 2)).astype(dtype)
    logits = pooled @ parameters["weight"].astype(dtype)
    return logits.astype(jnp.float32) + parameters["bias"], after


def train_one(state: Any, images: Any, labels: Any, dtype: Any) -> Any:
    """One step of one host."""
    parameters, momenta, statistics = state

    def loss_of(parameters: Any) -> tuple[Any, Any]:
        logits, after = forward(parameters, statistics, images, dtype)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -chosen.mean(), after

    gradients, after = jax.grad(loss_of, has_aux=True)(parameters)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    momenta = jax.tree.map(
        lambda m, g, p: MOMENTUM * m + g * scale + DECAY * p, momenta, gradients, parameters
    )
    parameters = jax.tree.map(lambda p, m: p - LR * m, parameters, momenta)
    return parameters, momenta, after


def train_all(dtype: Any, state: Any, data: Any, picks: Any) -> Any:
    """Steps of all hosts; `picks` are indices [steps, envs, batch]."""
    pixels, labels = data

    def step(state: Any, picks: Any) -> tuple[Any, None]:
        images = pixels[picks].astype(jnp.float32) / 64.0 - 2.0
        return jax.vmap(partial(train_one, dtype=dtype))(state, images, labels[picks]), None

    return lax.scan(step, state, picks)[0]


class Trainer:
    """Trains over random permutations."""

    def __init__(self, args: argparse.Namespace) -> None:
        device = jax.devices("cpu" if args.device == "cpu" else "gpu")[0]
        jax.config.update("jax_default_device", device)
        precision = {"f32": "highest", "tf32": "tensorfloat32", "bf16": "default"}[args.precision]
        jax.config.update("jax_default_matmul_precision", precision)
        keys = jax.random.split(jax.random.key(0), args.envs)
        parameters, statistics = jax.vmap(partial(initial, host=args.host))(keys)
        self.state = (parameters, jax.tree.map(jnp.zeros_like, parameters), statistics)
        pixels = jax.random.randint(keys[0], (IMAGES, SIDE, SIDE, 3), 0, 256, jnp.uint8)
        self.data = (pixels, jax.random.randint(keys[0], (IMAGES,), 0, CLASSES))
        dtype = jnp.bfloat16 if args.precision == "bf16" else jnp.float32
        self.program = jax.jit(partial(train_all, dtype), donate_argnums=0)
        self.shape, self.key = (STEPS, args.envs, args.batch), keys[0]
        count = STEPS * args.envs * args.batch

        def draw(key: Any) -> Any:
            orders = -(-count // IMAGES)
            keys = jax.random.split(key, orders)
            drawn = jax.vmap(lambda key: jax.random.permutation(key, IMAGES))(keys)
            return drawn.reshape(-1)[:count].reshape(self.shape)

        self.draw = jax.jit(draw)

    def train(self, programs: int) -> float:
        """Seconds that `programs` programs take, until the device is done."""
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for _ in range(programs):
            self.key, own = jax.random.split(self.key)
            self.state = self.program(self.state, self.data, self.draw(own))
        jax.block_until_ready(self.state)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arrangement", choices=("scan",), default="scan")
    parser.add_argument("--precision", choices=("f32", "tf32", "bf16"), default="f32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--host", choices=tuple(HOSTS), default="baseline")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    trainer = Trainer(args)
    trainer.train(2)
    print(json.dumps({"ready": True, "jax": jax.__version__}), flush=True)
    for line in sys.stdin:
        programs = max(1, round(float(line) * 2 / trainer.train(2)))
        rate = programs * STEPS * args.envs * args.batch / trainer.train(programs)
        print(json.dumps({"images_per_s": rate, "steps": programs * STEPS}), flush=True)


if __name__ == "__main__":
    # JAX must not preallocate all memory, because other programs take turns with it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp
    from jax import lax

    main()
