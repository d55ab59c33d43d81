"""Writes golden/ppo.safetensors: four epochs of PPO on one round, every head, mask and floor in use.

The policy is that of `crates/control/src/policy/network.rs`, the loss that of
`crates/kernels/src/ppo/mod.rs`, with gradients from autograd. The file has the f32 results; its metadata
has `torch_error`, the relative difference per tensor from f64 results on the same f32 inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import GoldenFile, Tensors, generator
from torch import Tensor, nn

SLOTS, BLUEPRINTS, HIDDEN, FEATURES = 3, 7, 16, 21
STEPS, ENVS, EPOCHS = 11, 3, 4
RESETS = [(5, 1), (8, 2), (9, 2)]
OPS = ["WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE"]
GERMINATE, SET, PRUNE = 1, 2, 3


@dataclass(frozen=True)
class Head:
    name: str
    size: int
    used_by: tuple[int, ...]
    floor: float
    multiplier: float


HEADS = [
    Head("op", 6, (0, 1, 2, 3, 4, 5), 0.15, 1.0),
    Head("slot", SLOTS, (1, 2, 3, 4, 5), 0.05, 1.0),
    Head("blueprint", BLUEPRINTS, (GERMINATE,), 0.12, 1.3),
    Head("style", 4, (GERMINATE, SET), 0.08, 1.2),
    Head("tempo", 3, (GERMINATE,), 0.12, 1.3),
    Head("alpha_target", 3, (GERMINATE, SET), 0.08, 1.2),
    Head("alpha_speed", 4, (SET, PRUNE), 0.06, 1.2),
    Head("alpha_curve", 5, (SET, PRUNE), 0.06, 1.2),
]
LOGITS = sum(head.size for head in HEADS)
CLIP, VALUE, ENTROPY, ENTROPY_FLOOR, PENALTY = 0.2, 0.5, 0.05, 0.9, 1.0
LR, EPS, CLIP_NORM = 0.01, 1e-5, 0.5


def mlp(out: int) -> nn.Sequential:
    middle = 3 * HIDDEN // 4
    return nn.Sequential(nn.Linear(HIDDEN, middle), nn.ReLU(), nn.Linear(middle, out))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BLUEPRINTS + 1, 4)
        inputs = FEATURES + 4 * SLOTS
        self.encoder = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU())
        self.lstm = nn.LSTM(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.heads = nn.ModuleDict({head.name: mlp(head.size) for head in HEADS})
        self.value = mlp(1)

    def forward(self, t: Tensors) -> Tensor:
        """Logits of all heads and V, [T, B, LOGITS + 1]."""
        embedded = self.embedding(t["blueprints"].long()).flatten(2)
        x = self.encoder(torch.cat([t["observations"], embedded], dim=2))
        h, c = t["state"].split(HIDDEN, dim=1)
        outputs = []
        for row, keep in zip(x, t["keep"], strict=True):
            state = tuple((s * keep[:, None])[None].contiguous() for s in (h, c))
            y, (h1, c1) = self.lstm(row[None], state)
            h, c = h1[0], c1[0]
            outputs.append(y[0])
        x = x + self.norm(torch.stack(outputs))
        return torch.cat([*(head(x) for head in self.heads.values()), self.value(x)], dim=2)


def probabilities(logits: Tensor, legal: Tensor, floor: float) -> Tensor:
    n = legal.sum(-1, keepdim=True)
    p = torch.softmax(logits.masked_fill(legal == 0, -1e9), -1)
    f = torch.clamp(0.99 / n, max=floor)
    return torch.where(legal > 0, torch.where(n > 1, f + (1 - n * f) * p, p), torch.zeros_like(p))


def loss(outputs: Tensor, t: Tensors, reference: Tensor | None) -> tuple[Tensors, Tensor]:
    """The parts of the loss, and the log-probabilities [T, B, heads]."""
    op, ops = t["choices"][..., 0], t["legal"][..., :6].sum(-1)
    decision, counts = ops > 1, ops > 0
    first, policy, entropy_loss = 0, outputs.new_zeros(()), outputs.new_zeros(())
    log_probs, entropies, clipped = [], [], []
    log_ratio = torch.zeros_like(outputs[..., 0])
    for k, head in enumerate(HEADS):
        columns = slice(first, first + head.size)
        first += head.size
        used = decision & torch.isin(op, torch.tensor(head.used_by).to(op.dtype))
        legal = t["legal"][..., columns]
        q = probabilities(outputs[..., columns], legal, head.floor)
        choice = t["choices"][..., k].long()
        one = torch.ones_like(q[..., 0])
        log_prob = torch.where(used, q.gather(-1, choice[..., None])[..., 0], one).log()
        log_probs.append(log_prob)
        x = log_prob - (log_prob.detach() if reference is None else reference[..., k])
        log_ratio = log_ratio + x
        ratio, a = x.exp(), t["advantages"]
        surrogate = torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
        n = legal.sum(-1)
        terms = torch.where(legal > 0, q, torch.ones_like(q))
        h = -(terms * terms.log()).sum(-1) / torch.where(n > 1, n, 2 * torch.ones_like(n)).log()
        mean = h[used].mean()
        policy = policy - surrogate[used].mean()
        below = (ENTROPY_FLOOR - mean).clamp(min=0)
        entropy_loss = entropy_loss + PENALTY * below**2 - ENTROPY * head.multiplier * mean
        entropies.append(mean)
        clipped.append((surrogate < ratio * a)[used].to(a.dtype).mean())
    value = (outputs[..., -1] - t["returns"])[counts].pow(2).mean()
    parts = {
        "policy_loss": policy,
        "value_loss": value,
        "entropy_loss": entropy_loss,
        "loss": policy + entropy_loss + VALUE * value,
        "kl": (log_ratio.exp() - 1 - log_ratio)[decision].mean(),
        "entropy": torch.stack(entropies),
        "clipped": torch.stack(clipped),
    }
    return parts, torch.stack(log_probs, -1)


def rollout() -> Tensors:
    source = generator("ppo/rollout")
    shape = (STEPS, ENVS)
    t: Tensors = {
        "observations": torch.randn((*shape, FEATURES), generator=source),
        "blueprints": torch.randint(BLUEPRINTS + 1, (*shape, SLOTS), generator=source).float(),
        "keep": torch.ones(shape),
        "state": torch.randn((ENVS, 2 * HIDDEN), generator=source) * 0.5,
        "advantages": torch.randn(shape, generator=source),
        "returns": torch.randn(shape, generator=source),
    }
    for step, env in RESETS:
        t["keep"][step, env] = 0.0
    legal, choices = torch.zeros((*shape, LOGITS)), torch.zeros((*shape, len(HEADS)))
    draw = lambda n: int(torch.randint(n, (), generator=source))  # noqa: E731
    for row in range(STEPS * ENVS):
        at = divmod(row, ENVS)
        # Row 4 has no legal op and is ignored; every eleventh row has only WAIT.
        ops = [0] if row % 11 == 7 else [0, *(op for op in range(1, 6) if draw(3) > 0), 1 + row % 5]
        ops = [] if row == 4 else ops
        op = ops[draw(len(ops))] if ops else 0
        op = ops[-1] if row % 2 == 0 and ops else op
        slots = [s for s in range(SLOTS) if draw(2)] or [draw(SLOTS)]
        first = 0
        for k, head in enumerate(HEADS):
            used = op in head.used_by and bool(ops)
            options = {"op": ops, "slot": slots}.get(head.name, list(range(head.size)))
            options = options if used else [0]
            choices[at][k] = op if head.name == "op" else options[draw(len(options))]
            if head.name != "op" or ops:
                for option in options:
                    legal[at][first + option] = 1.0
            first += head.size
    return t | {"legal": legal, "choices": choices}


def train(weights: Tensors, t: Tensors, dtype: torch.dtype) -> Tensors:
    """All results of a run, by name."""
    policy = Policy().to(dtype)
    policy.load_state_dict({k: v.to(dtype) for k, v in weights.items()})
    t = {k: v.to(dtype) for k, v in t.items()}
    adam = torch.optim.Adam(policy.parameters(), lr=LR, betas=(0.9, 0.999), eps=EPS)
    reference, result = None, {}
    for epoch in range(EPOCHS):
        adam.zero_grad()
        outputs = policy(t)
        parts, log_probs = loss(outputs, t, reference)
        parts["loss"].backward()
        result |= {f"epoch{epoch}/{k}": v.detach().reshape(-1) for k, v in parts.items()}
        if reference is None:
            reference = log_probs.detach()
            result |= {"outputs": outputs.detach(), "log_probs": reference}
        for name, p in policy.named_parameters():
            result[f"epoch{epoch}/grad.{name}"] = p.grad.clone()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), CLIP_NORM)
        result[f"epoch{epoch}/norm"] = norm.detach().reshape(1)
        adam.step()
    for name, p in policy.named_parameters():
        result[f"final/{name}"] = p.detach().clone()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(7)
    golden = GoldenFile("ppo", "reference/ppo.py: four epochs of PPO on one round")
    # Wide outputs, so that floors, entropies and clipping matter.
    policy = Policy()
    for module in [*policy.heads.values()]:
        nn.init.normal_(module[2].weight, std=1.0)
    weights = {k: v.detach().clone() for k, v in policy.state_dict().items()}
    batch = rollout()
    single, double = (train(weights, batch, d) for d in (torch.float32, torch.float64))
    scale = lambda v: max(float(v.abs().max()), 1e-30)  # noqa: E731
    error = {k: float((single[k].double() - v).abs().max()) / scale(v) for k, v in double.items()}
    clipped = torch.stack([single[f"epoch{e}/clipped"] for e in range(EPOCHS)])
    assert (clipped[0] == 0).all() and (clipped.amax(0) > 0).sum() >= 6, clipped
    assert (single["epoch0/entropy"] < ENTROPY_FLOOR).any(), single["epoch0/entropy"]
    assert all(not math.isnan(float(v.sum())) for v in single.values())
    print("norms", [float(single[f"epoch{e}/norm"]) for e in range(EPOCHS)])
    print("kl", [float(single[f"epoch{e}/kl"]) for e in range(EPOCHS)])
    print("entropy", single["epoch0/entropy"])
    print("largest error", max((v, k) for k, v in error.items()))
    golden.tensors |= {f"init/{k}": v.contiguous() for k, v in weights.items()}
    golden.tensors |= {f"batch/{k}": v.contiguous() for k, v in batch.items()}
    golden.tensors |= {k: v.float().contiguous() for k, v in single.items()}
    golden.write(
        slots=SLOTS, blueprints=BLUEPRINTS, hidden=HIDDEN, features=FEATURES, steps=STEPS,
        epochs=EPOCHS, clip=CLIP, value=VALUE, entropy=ENTROPY, entropy_floor=ENTROPY_FLOOR,
        entropy_floor_penalty=PENALTY, lr=LR, eps=EPS, clip_norm=CLIP_NORM,
        torch_error={k: float(f"{v:.1e}") for k, v in error.items()},
    )  # fmt: skip
