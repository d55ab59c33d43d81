"""Writes golden/widths.safetensors: further features of a layer, by GradMax and TINY."""

from __future__ import annotations

import torch
from common import GoldenFile, Tensors, generator
from torch import Tensor
from torch.nn import functional as F

# Amplitudes that the line search of TINY tries.
AMPLITUDES = [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
# Bias of a feature with incoming weights 0, so that the derivative of relu is 1.
ACTIVE = 1e-6
# Further features that are asked for.
COUNT = 3
golden = GoldenFile("widths", "reference/widths.py: further features by GradMax and TINY")


def linear(inputs: Tensors, extra: Tensors) -> tuple[Tensor, Tensor]:
    """Outputs of 4-5-6-3, with further features of the first layer; also the inputs of the second."""
    hidden = F.relu(F.linear(inputs["x"], inputs["one.weight"], inputs["one.bias"]))
    further = F.relu(F.linear(inputs["x"], extra["weight"], extra["bias"]))
    read = F.linear(hidden, inputs["two.weight"], inputs["two.bias"]) + further @ extra["outgoing"].T
    return F.linear(F.relu(read), inputs["classifier.weight"], inputs["classifier.bias"]), hidden


def convolutions(inputs: Tensors, extra: Tensors) -> tuple[Tensor, Tensor]:
    """Outputs of two convolutions with a pool between them."""
    hidden = F.max_pool2d(F.relu(F.conv2d(inputs["x"], inputs["one.weight"], inputs["one.bias"], padding=1)), 2)
    further = F.max_pool2d(F.relu(F.conv2d(inputs["x"], extra["weight"], extra["bias"], padding=1)), 2)
    read = F.conv2d(hidden, inputs["two.weight"], inputs["two.bias"], padding=1)
    read = read + F.conv2d(further, extra["outgoing"], padding=1)
    pooled = F.relu(read).mean((2, 3))
    return F.linear(pooled, inputs["classifier.weight"], inputs["classifier.bias"]), hidden


def incoming_gradient(network, inputs: Tensors) -> Tensor:
    """The gradient of incoming weights and bias for each outgoing weight of a feature: E[δ hᵀ]."""
    two, one = inputs["two.weight"], inputs["one.weight"]
    kernel = two.shape[2:].numel()
    places = two.shape[0] * kernel
    unit = torch.eye(places, dtype=two.dtype).reshape(places, two.shape[0], *two.shape[2:]).transpose(0, 1)
    extra = {
        "weight": torch.zeros(places, *one.shape[1:], dtype=one.dtype, requires_grad=True),
        "bias": torch.full((places,), ACTIVE, dtype=one.dtype, requires_grad=True),
        "outgoing": unit.contiguous(),
    }
    outputs, _ = network(inputs, extra)
    loss = F.cross_entropy(outputs, inputs["labels"].long())
    weight, bias = torch.autograd.grad(loss, [extra["weight"], extra["bias"]])
    return torch.cat([weight.flatten(1), bias[:, None]], 1)


def gradmax(network, inputs: Tensors) -> Tensors:
    """Evci et al. 2022: the first left singular vectors; their projector does not depend on signs."""
    u, s, _ = torch.linalg.svd(incoming_gradient(network, inputs), full_matrices=False)
    assert s[COUNT - 1] > 1.2 * s[COUNT], s
    two = inputs["two.weight"]
    length = (two.square().sum() / two.shape[1]).sqrt()
    return {"projector": length**2 * u[:, :COUNT] @ u[:, :COUNT].T}


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    assert values.min() > 1e-4 * values.max(), "full rank"
    return vectors * values**exponent @ vectors.T


def tiny(inputs: Tensors) -> Tensors:
    """Verbockhaven et al. 2024: products of outgoing and incoming weights, and losses by amplitude."""
    with_one = lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1)
    none = {"weight": torch.zeros_like(inputs["one.weight"]), "bias": torch.zeros_like(inputs["one.bias"])}
    none["outgoing"] = torch.zeros(6, 5, dtype=inputs["x"].dtype)
    two = {name: inputs[name].clone().requires_grad_() for name in ["two.weight", "two.bias"]}
    outputs, hidden = linear(inputs | two, none)
    loss = F.cross_entropy(outputs, inputs["labels"].long())
    weight, bias = torch.autograd.grad(loss, [two["two.weight"], two["two.bias"]])
    reader = torch.cat([weight, bias[:, None]], 1)
    h, b = with_one(inputs["x"]), with_one(hidden.detach())
    n = len(h)
    missing = -(incoming_gradient(linear, inputs) - reader @ power(b.T @ b / n, -1.0) @ (b.T @ h) / n)
    root = power(h.T @ h / n, -0.5)
    u, s, wt = torch.linalg.svd(root @ missing.T, full_matrices=False)
    assert s[COUNT - 1] > 1.2 * s[COUNT], s
    weights = wt[:COUNT].T
    # Of the two signs of a feature the one with which its largest outgoing weight is positive.
    scale = s[:COUNT].sqrt().copysign(weights.gather(0, weights.abs().argmax(0, keepdim=True))[0])
    incoming, outgoing = root @ u[:, :COUNT] * scale, weights * scale
    losses = []
    for amplitude in AMPLITUDES:
        alpha, omega = incoming * amplitude**0.5, outgoing * amplitude**0.5
        extra = {"weight": alpha[:-1].T, "bias": alpha[-1], "outgoing": omega}
        losses.append(F.cross_entropy(linear(inputs, extra)[0], inputs["labels"].long()))
    return {"product": outgoing @ incoming.T, "losses": torch.stack(losses)}


def case(name: str, shapes: dict[str, tuple[int, ...]], image: tuple[int, ...]) -> Tensors:
    random = generator(name)
    scaled = {key: torch.randn(shape, generator=random) * 0.5 for key, shape in shapes.items()}
    x = torch.randn(48, *image, generator=random)
    return scaled | {"x": x, "labels": torch.randint(3, (48,), generator=random)}


MLP = {
    "one.weight": (5, 4),
    "one.bias": (5,),
    "two.weight": (6, 5),
    "two.bias": (6,),
    "classifier.weight": (3, 6),
    "classifier.bias": (3,),
}
CONV = {
    "one.weight": (4, 2, 3, 3),
    "one.bias": (4,),
    "two.weight": (5, 4, 3, 3),
    "two.bias": (5,),
    "classifier.weight": (3, 5),
    "classifier.bias": (3,),
}

mlp, conv = case("mlp", MLP, (4,)), case("conv", CONV, (2, 6, 6))
golden.add("gradmax-mlp", "gradmax", mlp, lambda t: gradmax(linear, t), through="projector")
golden.add("gradmax-conv", "gradmax", conv, lambda t: gradmax(convolutions, t), through="projector")
golden.add("tiny-mlp", "tiny", mlp, tiny, through="product")
golden.write()
