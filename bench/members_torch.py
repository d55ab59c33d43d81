"""PyTorch peer of `members.py`, which trains on request: networks with different learning rates.

A way is `loop`, one network after the other, or `vmap`, `torch.func.vmap` over stacked networks, with
options after colons: `compile`, `bmm` (convolutions as products of windows, so that vmap makes one
batched product), and a number, the networks in a stack. vmap keeps no running statistics, which
saves it work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import members_peer
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

State = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 5, padding=2, bias=False)
        self.bn = nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class Conv(nn.Module):
    """The family `conv1d`, with the names of our weights."""

    def __init__(self, channels: list[int], widths: list[int], classes: int) -> None:
        super().__init__()
        pairs = zip([channels[0], *widths], widths, strict=False)
        self.blocks = nn.ModuleList(Block(*pair) for pair in pairs)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(F.max_pool1d(x, 2) if i else x)
        return self.classifier(x.mean(2))


class Mlp(nn.Module):
    """The family `mlp`, with the names of our weights."""

    def __init__(self, shape: list[int], widths: list[int], classes: int) -> None:
        super().__init__()
        pairs = zip([shape[0] * shape[1], *widths], widths, strict=False)
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.classifier(x)


class Strided(nn.Module):
    """`mnist1d_cnn.toml`, with the names of our weights."""

    def __init__(self, shape: list[int], widths: list[int], classes: int) -> None:
        super().__init__()
        kernels = zip([shape[0], *widths], widths, (5, 3, 3), strict=False)
        self.strided = nn.ModuleList(nn.Conv1d(*kernel, 2, 1) for kernel in kernels)
        self.classifier = nn.Linear(125, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.strided:
            x = torch.relu(layer(x))
        return self.classifier(x.flatten(1))


def network(p: State, x: Tensor, bmm: bool) -> Tensor:
    """Logits of one network, without running statistics."""
    depth = sum(name.endswith(("conv.weight", "hidden.0.weight")) for name in p)
    if "hidden.0.weight" in p:
        x = x.flatten(1)
        for i in range(sum(name.startswith("hidden") for name in p) // 2):
            x = torch.relu(F.linear(x, p[f"hidden.{i}.weight"], p[f"hidden.{i}.bias"]))
    elif "strided.0.weight" in p:
        for i in range(3):
            weight, bias = p[f"strided.{i}.weight"], p[f"strided.{i}.bias"]
            if bmm:
                padded, kernel = F.pad(x, (1, 1)), weight.shape[2]
                size = (padded.shape[2] - kernel) // 2 + 1
                # `unfold` has no backward pass for vmap.
                windows = [padded[:, :, k : k + 2 * size - 1 : 2] for k in range(kernel)]
                product = weight.transpose(1, 2).flatten(1) @ torch.cat(windows, 1)
                x = torch.relu(product + bias[:, None])
            else:
                x = torch.relu(F.conv1d(x, weight, bias, 2, 1))
        x = x.flatten(1)
    elif bmm:
        x = x.transpose(1, 2)
        for i in range(depth):
            x = x.unflatten(1, (-1, 2)).amax(2) if i else x
            size = x.shape
            x = F.pad(x, (0, 0, 2, 2)).unfold(1, 5, 1).reshape(size[0] * size[1], -1)
            x = x @ p[f"blocks.{i}.conv.weight"].flatten(1).T
            gamma, beta = p[f"blocks.{i}.bn.weight"], p[f"blocks.{i}.bn.bias"]
            x = torch.relu(F.batch_norm(x, None, None, gamma, beta, training=True))
            x = x.unflatten(0, size[:2])
        x = x.mean(1)
    else:
        for i in range(depth):
            x = F.max_pool1d(x, 2) if i else x
            x = F.conv1d(x, p[f"blocks.{i}.conv.weight"], padding=2)
            gamma, beta = p[f"blocks.{i}.bn.weight"], p[f"blocks.{i}.bn.bias"]
            x = torch.relu(F.batch_norm(x, None, None, gamma, beta, training=True))
        x = x.mean(2)
    return F.linear(x, p["classifier.weight"], p["classifier.bias"])


class Loop:
    """One network after the other."""

    def __init__(self, job: members_peer.Job, init: State) -> None:
        widths, kind = job.widths, {"conv1d": Conv, "mlp": Mlp, "strided": Strided}[job.family]
        shape = list(job.x.shape[1:])
        self.nets = [kind(shape, widths, 10) for _ in job.rates]
        for net in self.nets:
            net.load_state_dict(init)
        own = {"momentum": job.MOMENTUM, "weight_decay": job.DECAY, "fused": True}
        self.sgd = [
            torch.optim.SGD(net.parameters(), lr=rate, **own)
            for net, rate in zip(self.nets, job.rates, strict=True)
        ]

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(net(x), y)

        self.loss: Callable[..., Tensor] = torch.compile(loss) if "compile" in job.options else loss
        self.x, self.y = torch.from_numpy(job.x), torch.from_numpy(job.y).long()

    def step(self, picks: Tensor, sums: Tensor) -> None:
        for i, (net, sgd) in enumerate(zip(self.nets, self.sgd, strict=True)):
            loss = self.loss(net, self.x[picks[i]], self.y[picks[i]])
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
            sums[i] += loss.detach()


class Stacked:
    """Stacks of networks by `torch.func.vmap`."""

    def __init__(self, job: members_peer.Job, init: State) -> None:
        learned = {k: v for k, v in init.items() if "running" not in k and "tracked" not in k}
        size = next((int(o) for o in job.options if o.isdigit()), len(job.rates))
        self.spans = [
            slice(i, min(i + size, len(job.rates))) for i in range(0, len(job.rates), size)
        ]
        rates = torch.tensor(job.rates)
        self.stacks = []
        for span in self.spans:
            count = span.stop - span.start
            stacked = {k: v.expand(count, *v.shape).clone() for k, v in learned.items()}
            momenta = {k: torch.zeros_like(v) for k, v in stacked.items()}
            self.stacks.append((stacked, momenta, rates[span]))
        self.x, self.y = torch.from_numpy(job.x), torch.from_numpy(job.y).long()
        bmm = "bmm" in job.options

        def loss(p: State, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(network(p, x, bmm), y)

        gradients = torch.func.vmap(torch.func.grad_and_value(loss))

        def step(p: State, m: State, rate: Tensor, x: Tensor, y: Tensor, picks: Tensor) -> Tensor:
            grads, losses = gradients(p, x[picks], y[picks])
            for name, weight in p.items():
                m[name].mul_(job.MOMENTUM).add_(grads[name]).add_(weight, alpha=job.DECAY)
                weight.sub_(m[name] * rate.view(-1, *[1] * (weight.dim() - 1)))
            return losses

        self.update: Callable[..., Tensor] = (
            torch.compile(step) if "compile" in job.options else step
        )

    @torch.no_grad()
    def step(self, picks: Tensor, sums: Tensor) -> None:
        for span, (stacked, momenta, rates) in zip(self.spans, self.stacks, strict=True):
            sums[span] += self.update(stacked, momenta, rates, self.x, self.y, picks[span])


def train(job: members_peer.Job, state: Loop | Stacked, request: dict[str, Any]) -> Any:
    """Mean losses of each epoch, by member."""
    members, samples, losses = len(job.rates), len(job.x), []
    in_order, batches = request["in_order"], request["batches"]
    for _ in range(request["epochs"]):
        orders = [
            torch.arange(samples) if in_order else torch.randperm(samples) for _ in range(members)
        ]
        order = torch.stack(orders)
        sums = torch.zeros(members)
        for n in range(batches):
            state.step(order[:, n * job.batch : (n + 1) * job.batch], sums)
        losses.append((sums / batches).tolist())
    return losses


def main() -> None:
    job = members_peer.Job.parse()
    torch.set_num_threads(job.threads)
    init = load_file(job.init)
    init = {k: v.squeeze(2) if v.dim() == 4 else v for k, v in init.items()}

    def make() -> Loop | Stacked:
        return Loop(job, init) if job.way == "loop" else Stacked(job, init)

    state = make()
    picks = torch.zeros(len(job.rates), job.batch, dtype=torch.int64) + torch.arange(job.batch)
    for _ in range(3):
        state.step(picks, torch.zeros(len(job.rates)))
    state = make()
    members_peer.serve(torch.__version__, lambda request: train(job, state, request))


if __name__ == "__main__":
    main()
