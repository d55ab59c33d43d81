"""Writes golden/optimisers.safetensors: 20 steps of each optimiser from given gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from common import GoldenFile, Tensors, generator
from torch import Tensor
from torch.optim import Optimizer, _muon

STEPS = 20
# Step before which the parameters `late.…` are new: until then they have no gradient.
BORN = 10
SHAPES = {
    "conv.weight": (4, 3, 3, 3),
    "late.weight": (4, 4, 1, 1),
    "late.bias": (4,),
    "depthwise.weight": (4, 1, 3, 3),
    "grouped.weight": (6, 2, 1, 3),
    "tall.weight": (10, 6),
    "tall.bias": (10,),
    "out.weight": (3, 10),
    "out.bias": (3,),
}
golden = GoldenFile("optimisers", "reference/optimisers.py: 20 steps of each optimiser")


def exact_newton_schulz(grad: Tensor, coefficients: tuple[float, ...], steps: int, eps: float) -> Tensor:
    """PyTorch's function of this name, in the type of its argument instead of bfloat16."""
    a, b, c = coefficients
    x = grad.clone()
    if grad.size(0) > grad.size(1):
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def check_newton_schulz() -> None:
    """Compares it with PyTorch's, whose bfloat16 has 8 bits: 2^-9 of rounding in each of 15 products.

    Values near 1 are multiplied by at most 3.44 in an iteration, and by about 1 in most.
    """
    for shape in [(4, 27), (10, 6), (3, 10)]:
        x = torch.randn(shape, generator=generator(str(shape)))
        arguments = (x, (3.4445, -4.775, 2.0315), 5, 1e-7)
        theirs = _muon._zeropower_via_newtonschulz(*arguments).float()
        apart = (exact_newton_schulz(*arguments) - theirs).abs().max().item()
        assert apart < 15 * 3.44 * 2**-9, f"{shape}: {apart}"


class Lion(Optimizer):
    """The program in arXiv 2302.06675; PyTorch has none."""

    def __init__(self, params: Iterable[Tensor], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = average * first + p.grad * (1 - first)
                # Far from the jump of the sign, so that rounding does not change it.
                assert update.abs().min() > 1e-5 * update.abs().max()
                p.add_(update.sign(), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)


def optimisers(name: str, settings: dict[str, float], params: Tensors) -> list[Optimizer]:
    lr, decay = settings["lr"], settings["weight_decay"]
    betas = (settings.get("beta1", 0.0), settings.get("beta2", 0.0))
    eps, momentum = settings.get("eps", 0.0), settings.get("momentum", 0.0)
    every = list(params.values())
    match name:
        case "sgd" | "nesterov":
            nesterov = name == "nesterov"
            return [torch.optim.SGD(every, lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov)]
        case "adam":
            return [torch.optim.Adam(every, lr=lr, betas=betas, eps=eps, weight_decay=decay)]
        case "adamw":
            return [torch.optim.AdamW(every, lr=lr, betas=betas, eps=eps, weight_decay=decay)]
        case "lion":
            return [Lion(every, lr=lr, betas=betas, weight_decay=decay)]
    matrices = [p for p in every if p.ndim == 2]
    others = [p for p in every if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=lr, momentum=momentum, weight_decay=decay),
        torch.optim.AdamW(others, lr=settings["adam_lr"], betas=betas, eps=eps, weight_decay=decay),
    ]


def matrix(t: Tensor) -> Tensor:
    """A kernel of a convolution as the matrix [out, rest]."""
    return t.reshape(len(t), -1) if t.ndim == 4 else t


def trained(name: str, settings: dict[str, float], tensors: Tensors) -> Tensors:
    """Parameters, named as they are, and the state of their optimisers after 20 steps."""
    params = {key: matrix(tensors[key]).clone().requires_grad_() for key in SHAPES}
    steps = optimisers(name, settings, params)
    for i in range(STEPS):
        for key, param in params.items():
            late = key.startswith("late") and i < BORN
            param.grad = None if late else matrix(tensors[f"{key}.gradients"][i]).clone()
        for optimiser in steps:
            optimiser.step()
    results = {key: param.detach().reshape(SHAPES[key]) for key, param in params.items()}
    for key, param in params.items():
        state = next(optimiser.state[param] for optimiser in steps if param in optimiser.state)
        for part, value in state.items():
            value = torch.as_tensor(value, dtype=param.dtype)
            shape = SHAPES[key] if part != "step" else (1,)
            entry = key if part == "momentum_buffer" and name != "muon" else f"{key}.{part}"
            results[f"state.{entry}"] = value.reshape(shape)
    return results


def main() -> None:
    source = generator("optimisers")
    tensors = {key: torch.randn(shape, generator=source) for key, shape in SHAPES.items()}
    for key, shape in SHAPES.items():
        # Of several sizes, because the averages of Adam forget large ones slowly.
        sizes = torch.tensor([10.0 ** (i % 5 - 3) for i in range(STEPS)])
        sizes = sizes.reshape(STEPS, *(1 for _ in shape))
        tensors[f"{key}.gradients"] = sizes * torch.randn((STEPS, *shape), generator=source)
    adam = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    cases = {
        "nesterov": {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-3},
        "adam": {**adam, "weight_decay": 0.05},
        "adamw": {**adam, "weight_decay": 0.5},
        "lion": {"lr": 3e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.5},
        "muon": {
            "lr": 0.02, "momentum": 0.95, "weight_decay": 0.1,
            "adam_lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-10,
        },
    }  # fmt: skip
    for name, settings in cases.items():
        golden.add(
            name, name, tensors,
            lambda t, name=name, settings=settings: trained(name, settings, t),
            through="conv.weight", steps=STEPS, born=BORN, **settings,
        )  # fmt: skip
    # The inputs are those of the first case.
    first = next(iter(cases))
    for key in [key for key in golden.tensors if "/in." in key and not key.startswith(f"{first}/")]:
        del golden.tensors[key]


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_newton_schulz()
    _muon._zeropower_via_newtonschulz = exact_newton_schulz
    main()
    golden.write()
