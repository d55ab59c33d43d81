"""Writes golden/recurrent.safetensors: layers over sequences, forward and backward, and Adam."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import GoldenFile, Tensors, generator
from torch import Tensor, nn

golden = GoldenFile("recurrent", "reference/recurrent.py: layers over sequences, and Adam")


def randn(case: str, **shapes: tuple[int, ...]) -> Tensors:
    """Standard normal tensors, drawn in the order in which they are named."""
    source = generator(case)
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}


def lstm(t: Tensors, hidden: int) -> tuple[Tensor, Tensor]:
    """PyTorch's LSTM, one step at a time, because the state is multiplied by `keep` before each step.

    x is [T, B, in], keep [T, B], state [B, 2 hidden]: h, then c. Returns h of every step, last state.
    """
    names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    layer = nn.LSTM(t["x"].shape[-1], hidden).to(t["x"].dtype)
    params = {name: t[name] for name in names}
    h, c = t["state"].split(hidden, dim=1)
    outputs = []
    for x, keep in zip(t["x"], t["keep"], strict=True):
        state = tuple((s * keep[:, None])[None].contiguous() for s in (h, c))
        y, (h1, c1) = torch.func.functional_call(layer, params, (x[None], state))
        h, c = h1[0], c1[0]
        outputs.append(y[0])
    return torch.stack(outputs), torch.cat([h, c], dim=1)


def recurrent() -> None:
    for steps, batch, inputs_n, hidden, resets in [
        (1, 1, 3, 1, []), (1, 5, 7, 8, [(0, 2)]), (4, 1, 5, 3, []), (9, 3, 8, 16, [(4, 1), (0, 2)]),
        (40, 4, 17, 11, [(13, 0), (25, 3), (39, 2)]),
    ]:  # fmt: skip
        case = f"lstm_t{steps}b{batch}_{inputs_n}x{hidden}"
        scale = hidden**-0.5
        inputs = randn(
            case, x=(steps, batch, inputs_n), state=(batch, 2 * hidden),
            weight_ih_l0=(4 * hidden, inputs_n), weight_hh_l0=(4 * hidden, hidden),
            bias_ih_l0=(4 * hidden,), bias_hh_l0=(4 * hidden,),
        )  # fmt: skip
        grads = tuple(inputs)
        for name in ("weight_ih_l0", "weight_hh_l0"):
            inputs[name] *= scale
        inputs["keep"] = torch.ones(steps, batch)
        for t, b in resets:
            inputs["keep"][t, b] = 0.0

        def forward(t: Tensors) -> Tensors:
            y, last = lstm(t, hidden)
            return {"y": y, "last": last}

        golden.add(case, "lstm", inputs, forward, grads=grads, steps=steps, hidden=hidden)


def rows() -> None:
    for rows_n, features, mean in [(2, 3, 0.0), (3, 7, 2.0), (5, 17, -1.0), (12, 128, 0.5)]:
        case = f"layer_norm_{rows_n}x{features}"
        inputs = randn(case, x=(rows_n, features), weight=(features,), bias=(features,))
        inputs["x"] = inputs["x"] * 1.5 + mean

        def layer_norm(t: Tensors) -> Tensors:
            return {"y": F.layer_norm(t["x"], (features,), t["weight"], t["bias"], 1e-5)}

        golden.add(case, "layer_norm", inputs, layer_norm, grads=tuple(inputs))
    for rows_n, count, entries, size in [(1, 1, 1, 3), (6, 3, 8, 4), (40, 2, 5, 1)]:
        case = f"embedding_{rows_n}x{count}_{entries}x{size}"
        inputs = randn(case, weight=(entries, size))
        indices = torch.randint(entries, (rows_n, count), generator=generator(case + "/x"))
        inputs["x"] = indices.float()
        golden.add(
            case, "embedding", inputs,
            lambda t: {"y": F.embedding(t["x"].long(), t["weight"]).flatten(1)},
            grads=("weight",),
        )  # fmt: skip


def optimiser() -> None:
    """Five steps of Adam from given gradients; the third is zero."""
    for lr, eps, scale in [(3e-4, 1e-5, 1.0), (0.1, 1e-8, 1e-3), (0.01, 1e-5, 1e-6)]:
        case = f"adam_lr{lr}_scale{scale}"
        inputs = randn(case, param=(17,), **{f"grad{i}": (17,) for i in range(5)})
        for i in range(5):
            inputs[f"grad{i}"] *= scale
        inputs["grad2"].zero_()

        def adam(t: Tensors) -> Tensors:
            param = t["param"].clone().requires_grad_()
            steps = torch.optim.Adam([param], lr=lr, betas=(0.9, 0.999), eps=eps)
            for i in range(5):
                param.grad = t[f"grad{i}"].clone()
                steps.step()
            state = steps.state[param]
            averages = {k: state[k] for k in ("exp_avg", "exp_avg_sq")}
            return {"y": param.detach(), **averages}

        golden.add(case, "adam", inputs, adam, lr=lr, eps=eps)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for section in (recurrent, rows, optimiser):
        section()
    golden.write()
