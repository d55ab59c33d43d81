"""JAX peer of `members.py`, which trains on request: networks with different learning rates.

A way is `loop`, one jitted step of a network after the other, or `vmap`, vmap and jit over stacked
networks, with options after colons: `bmm` (convolutions as products of windows, so that vmap makes
one batched product), and a number, the networks in a stack. No running statistics are kept, which
saves work.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import members_peer
import numpy as np
from safetensors.numpy import load_file

CORES = os.sched_getaffinity(0)
EPS = 1e-5


def strided(p: Any, i: int, x: Any, bmm: bool) -> Any:
    """Convolution `i` of `mnist1d_cnn.toml`, with stride 2."""
    weight, bias = p[f"strided.{i}.weight"], p[f"strided.{i}.bias"]
    outputs, _, kernel = weight.shape
    if not bmm:
        return bias + lax.conv_general_dilated(
            x, weight, (2,), [(1, 1)], dimension_numbers=("NWC", "OIW", "NWC")
        )
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    size = (padded.shape[1] - kernel) // 2 + 1
    windows = jnp.concatenate([padded[:, k : k + 2 * size - 1 : 2] for k in range(kernel)], axis=2)
    return windows @ weight.transpose(2, 1, 0).reshape(-1, outputs) + bias


def forward(p: Any, x: Any, bmm: bool) -> Any:
    """Logits of samples [batch, channels, points]."""
    if "hidden.0.weight" in p:
        x = x.reshape(x.shape[0], -1)
        for i in range(sum(name.startswith("hidden") for name in p) // 2):
            x = jax.nn.relu(x @ p[f"hidden.{i}.weight"].T + p[f"hidden.{i}.bias"])
        return x @ p["classifier.weight"].T + p["classifier.bias"]
    x = jnp.swapaxes(x, 1, 2)
    if "strided.0.weight" in p:
        for i in range(3):
            x = jax.nn.relu(strided(p, i, x, bmm))
        x = jnp.swapaxes(x, 1, 2).reshape(x.shape[0], -1)
        return x @ p["classifier.weight"].T + p["classifier.bias"]
    for i in range(sum(name.endswith("conv.weight") for name in p)):
        if i:
            x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2]).max(2)
        weight, size = p[f"blocks.{i}.conv.weight"], x.shape[1]
        if bmm:
            padded = jnp.pad(x, ((0, 0), (2, 2), (0, 0)))
            windows = jnp.concatenate([padded[:, k : k + size] for k in range(5)], axis=2)
            x = windows @ weight.transpose(2, 1, 0).reshape(-1, weight.shape[0])
        else:
            x = lax.conv_general_dilated(
                x, weight, (1,), "SAME", dimension_numbers=("NWC", "OIW", "NWC")
            )
        mean, var = x.mean((0, 1)), x.var((0, 1))
        scale = lax.rsqrt(var + EPS) * p[f"blocks.{i}.bn.weight"]
        x = jax.nn.relu((x - mean) * scale + p[f"blocks.{i}.bn.bias"])
    return x.mean(1) @ p["classifier.weight"].T + p["classifier.bias"]


def step_of(bmm: bool, p: Any, m: Any, rate: Any, x: Any, y: Any, picks: Any) -> Any:
    """One step of one network: its parameters and momenta, and the loss."""
    x, y = x[picks], y[picks]

    def loss(p: Any) -> Any:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(forward(p, x, bmm)), y[:, None], 1)
        return -chosen.mean()

    value, g = jax.value_and_grad(loss)(p)
    m = jax.tree.map(
        lambda m, g, p: members_peer.Job.MOMENTUM * m + g + members_peer.Job.DECAY * p, m, g, p
    )
    return jax.tree.map(lambda p, m: p - rate * m, p, m), m, value


class Fleet:
    """Stacks of networks, or with `loop` single ones."""

    def __init__(self, job: members_peer.Job, init: dict[str, np.ndarray]) -> None:
        self.job, members = job, len(job.rates)
        size = next((int(o) for o in job.options if o.isdigit()), members)
        size = 1 if job.way == "loop" else size
        self.spans = [(i, min(i + size, members)) for i in range(0, members, size)]
        step = partial(step_of, "bmm" in job.options)
        if job.way == "vmap":
            step = jax.vmap(step, in_axes=(0, 0, 0, None, None, 0))
        self.update = jax.jit(step, donate_argnums=(0, 1))
        self.x, self.y = jnp.asarray(job.x), jnp.asarray(job.y)
        self.reset(init)

    def reset(self, init: dict[str, np.ndarray]) -> None:
        self.stacks = []
        for begin, end in self.spans:
            lead = () if self.job.way == "loop" else (end - begin,)
            p = {k: jnp.array(np.broadcast_to(v, lead + v.shape)) for k, v in init.items()}
            rates = jnp.asarray(self.job.rates[begin:end])
            momenta = jax.tree.map(jnp.zeros_like, p)
            self.stacks.append((p, momenta, rates[0] if self.job.way == "loop" else rates))

    def step(self, picks: np.ndarray, losses: list[list[Any]]) -> None:
        for i, (begin, end) in enumerate(self.spans):
            p, m, rate = self.stacks[i]
            own = picks[begin] if self.job.way == "loop" else picks[begin:end]
            p, m, loss = self.update(p, m, rate, self.x, self.y, own)
            self.stacks[i] = (p, m, rate)
            losses[i].append(loss)


def train(fleet: Fleet, request: dict[str, Any], random: np.random.Generator) -> Any:
    """Mean losses of each epoch, by member."""
    job = fleet.job
    members, samples, found = len(job.rates), len(job.x), []
    for _ in range(request["epochs"]):
        order = np.tile(np.arange(samples, dtype=np.int32), (members, 1))
        if not request["in_order"]:
            order = random.permuted(order, axis=1)
        losses: list[list[Any]] = [[] for _ in fleet.spans]
        for n in range(request["batches"]):
            fleet.step(order[:, n * job.batch : (n + 1) * job.batch], losses)
        means = [np.mean([np.atleast_1d(loss) for loss in of_stack], axis=0) for of_stack in losses]
        found.append(np.concatenate(means).tolist())
    return found


def main() -> None:
    job = members_peer.Job.parse()
    init = load_file(job.init)
    init = {k: v for k, v in init.items() if "running" not in k and "tracked" not in k}
    init = {k: v.squeeze(2) if v.ndim == 4 else v for k, v in init.items()}
    fleet = Fleet(job, init)
    picks = np.tile(np.arange(job.batch, dtype=np.int32), (len(job.rates), 1))
    for _ in range(3):
        fleet.step(picks, [[] for _ in fleet.spans])
    fleet.reset(init)
    # The pool of threads was sized by the cores allowed at its start; now its threads may move.
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), CORES)
    random = np.random.default_rng(0)
    members_peer.serve(jax.__version__, lambda request: train(fleet, request, random))


if __name__ == "__main__":
    threads = int(sys.argv[sys.argv.index("--threads") + 1])
    os.sched_setaffinity(0, sorted(CORES)[:threads])
    import jax
    from jax import lax
    from jax import numpy as jnp

    main()
