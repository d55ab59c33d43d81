"""Writes golden/widths.safetensors: further features of a layer, by GradMax and TINY."""

from __future__ import annotations

import torch
from common import GoldenFile, Tensors, generator
from torch import Tensor
from torch.nn import functional as F

# Amplitudes that the line search of TINY tries, for linear layers and for images.
AMPLITUDES = [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
IMAGE_AMPLITUDES = [4.0**i for i in range(-2, 7)]
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


def strided(inputs: Tensors, extra: Tensors) -> tuple[Tensor, Tensor]:
    """Outputs of two convolutions, the second with a stride, without a bias."""
    hidden = F.relu(F.conv2d(inputs["x"], inputs["one.weight"], inputs["one.bias"], padding=1))
    further = F.relu(F.conv2d(inputs["x"], extra["weight"], extra["bias"], padding=1))
    read = F.conv2d(torch.cat([hidden, further], 1), torch.cat([inputs["two.weight"], extra["outgoing"]], 1), stride=2, padding=1)
    pooled = F.relu(read).mean((2, 3))
    return F.linear(pooled, inputs["classifier.weight"], inputs["classifier.bias"]), hidden


def flattened(inputs: Tensors, extra: Tensors) -> tuple[Tensor, Tensor]:
    """Outputs of a convolution that a linear layer reads, as a convolution with the image as its kernel."""
    hidden = F.relu(F.conv2d(inputs["x"], inputs["one.weight"], inputs["one.bias"], padding=1))
    further = F.relu(F.conv2d(inputs["x"], extra["weight"], extra["bias"], padding=1))
    kernel = inputs["two.weight"].unflatten(1, hidden.shape[1:])
    read = F.conv2d(torch.cat([hidden, further], 1), torch.cat([kernel, extra["outgoing"]], 1), inputs["two.bias"])
    return F.linear(F.relu(read.flatten(1)), inputs["classifier.weight"], inputs["classifier.bias"]), hidden


def incoming_gradient(network, inputs: Tensors, kernel: tuple[int, ...] | None = None) -> Tensor:
    """The gradient of incoming weights and bias for each outgoing weight of a feature: E[δ hᵀ].

    The kernel is the one of the layer that reads the features.
    """
    two, one = inputs["two.weight"], inputs["one.weight"]
    shape = (two.shape[0], *(two.shape[2:] if kernel is None else kernel))
    places = torch.Size(shape).numel()
    unit = torch.eye(places, dtype=two.dtype).reshape(places, *shape).transpose(0, 1)
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


def best_features(m: Tensor, reader: Tensor, hh: Tensor, bb: Tensor, bh: Tensor) -> tuple[Tensor, Tensor]:
    """Incoming and outgoing weights in columns; bh is [b, outgoing weights of an output, h]."""
    outputs = len(reader)
    explained = torch.einsum("ob,bkh->okh", reader @ power(bb, -1.0), bh).reshape(len(m), -1)
    root = power(hh, -0.5)
    u, s, wt = torch.linalg.svd(root @ (explained - m).T, full_matrices=False)
    assert len(m) == outputs * bh.shape[1] and s[COUNT - 1] > 1.2 * s[COUNT], s
    weights = wt[:COUNT].T
    # Of the two signs of a feature the one with which its largest outgoing weight is positive.
    scale = s[:COUNT].sqrt().copysign(weights.gather(0, weights.abs().argmax(0, keepdim=True))[0])
    return root @ u[:, :COUNT] * scale, weights * scale


def reader_gradient(network, inputs: Tensors, outgoing: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Gradient of the weights and bias of the second layer, a row for each output, and its inputs."""
    none = {"weight": torch.zeros_like(inputs["one.weight"][:1]), "bias": torch.zeros_like(inputs["one.bias"][:1])}
    none["outgoing"] = torch.zeros(outgoing, dtype=inputs["x"].dtype)
    two = {name: inputs[name].clone().requires_grad_() for name in ["two.weight", "two.bias"] if name in inputs}
    outputs, hidden = network(inputs | two, none)
    gradients = torch.autograd.grad(F.cross_entropy(outputs, inputs["labels"].long()), list(two.values()))
    return torch.cat([of.flatten(1) if of.dim() > 1 else of[:, None] for of in gradients], 1), hidden.detach()


def searched(network, inputs: Tensors, incoming: Tensor, outgoing: Tensor, shape: tuple[int, ...]) -> Tensors:
    """Products of outgoing and incoming weights, and losses by amplitude."""
    losses = []
    for amplitude in [0.0, *(IMAGE_AMPLITUDES if inputs["x"].dim() > 2 else AMPLITUDES)]:
        alpha, omega = incoming * amplitude**0.5, outgoing * amplitude**0.5
        weight = alpha[:-1].T.reshape(COUNT, *inputs["one.weight"].shape[1:])
        omega = omega.reshape(*shape, COUNT).movedim(-1, 1)
        outputs, _ = network(inputs, {"weight": weight, "bias": alpha[-1], "outgoing": omega})
        losses.append(F.cross_entropy(outputs, inputs["labels"].long()))
    assert min(losses[1:]) < losses[0] - 1e-3, losses
    return {"product": outgoing @ incoming.T, "losses": torch.stack(losses[1:])}


def tiny(inputs: Tensors) -> Tensors:
    """Verbockhaven et al. 2024, for two linear layers."""
    with_one = lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1)
    reader, hidden = reader_gradient(linear, inputs, (6, 1))
    h, b = with_one(inputs["x"]), with_one(hidden)
    n, m = len(h), incoming_gradient(linear, inputs)
    incoming, outgoing = best_features(m, reader, h.T @ h / n, b.T @ b / n, (b.T @ h / n)[:, None])
    return searched(linear, inputs, incoming, outgoing, (6,))


def tiny_images(network, inputs: Tensors, kernel: tuple[int, int], **reading: int) -> Tensors:
    """The same for a convolution with padding 1, and a convolution that reads it."""
    n, outputs = len(inputs["x"]), len(inputs["two.weight"])
    with_one = lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1)
    reader, hidden = reader_gradient(network, inputs, (outputs, 1, *kernel))
    h = with_one(F.unfold(inputs["x"], 3, padding=1))
    b = F.unfold(hidden, kernel, **reading)
    b = with_one(b) if "two.bias" in inputs else b
    # For each position of the second layer's output, the h that its kernel meets.
    met = F.unfold(h.unflatten(2, hidden.shape[2:]), kernel, **reading).unflatten(1, (h.shape[1], -1))
    # The mean over the elements of the kernel that are not in the padding, where the 1 of the bias is 0.
    elements = met[:, -1].sum() / met[:, -1, 0].numel()
    hh = torch.einsum("nakq,nckq->ac", met, met) / (n * elements)
    bb = torch.einsum("naq,ncq->ac", b, b) / n
    m = incoming_gradient(network, inputs, kernel)
    bh = torch.einsum("nbq,nhkq->bkh", b, met) / n
    return searched(network, inputs, *best_features(m, reader, hh, bb, bh), (outputs, *kernel))


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

STRIDED = {key: shape for key, shape in CONV.items() if key != "two.bias"}
FLATTENED = CONV | {"two.weight": (5, 4 * 9)}

mlp, conv = case("mlp", MLP, (4,)), case("conv", CONV, (2, 6, 6))
golden.add("gradmax-mlp", "gradmax", mlp, lambda t: gradmax(linear, t), through="projector")
golden.add("gradmax-conv", "gradmax", conv, lambda t: gradmax(convolutions, t), through="projector")
golden.add("tiny-mlp", "tiny", mlp, tiny, through="product")
# Images whose positions are all measured.
images = case("strided 2", STRIDED, (2, 4, 4)), case("flattened 71", FLATTENED, (2, 3, 3))
ways = lambda t: tiny_images(strided, t, (3, 3), stride=2, padding=1), lambda t: tiny_images(flattened, t, (3, 3))
for name, inputs, way in zip(["tiny-strided", "tiny-flattened"], images, ways, strict=True):
    golden.add(name, "tiny", inputs, way, through="product")
golden.write()
