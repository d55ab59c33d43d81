"""Writes the files layers, windows, activations and norms of the folder golden: every layer forward and
backward, at odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import GoldenFile, Tensors, generator
from torch import Tensor

golden = GoldenFile("layers", "reference/layers.py: each layer forward and backward")
#: Layers between the blocks of a host: pooling windows, joins of branches, images as vectors.
windows = GoldenFile("windows", "reference/layers.py: windows, joins and flatten")
#: Norms over the channels of each pixel.
channel_norms = GoldenFile("norms", "reference/layers.py: layer norm and RMS norm of images and vectors")
activations = GoldenFile("activations", "reference/layers.py: functions of one element")


def randn(case: str, **shapes: tuple[int, ...]) -> Tensors:
    """Standard normal tensors, drawn in the order in which they are named."""
    source = generator(case)
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}


def dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def conv2d() -> None:
    # (input shape, output channels, kernel, stride, padding, groups, bias)
    table: list[tuple[tuple[int, int, int, int], int, int, int, int, int, bool]] = [
        ((1, 1, 5, 7), 1, 1, 1, 0, 1, False),
        ((3, 3, 6, 5), 8, 1, 1, 0, 1, True),
        ((5, 17, 3, 4), 7, 1, 1, 0, 1, False),
        ((3, 7, 5, 6), 3, 1, 2, 0, 1, True),
        ((1, 3, 4, 3), 7, 1, 1, 1, 1, True),
        ((5, 8, 4, 6), 8, 1, 2, 1, 2, False),
        ((3, 3, 7, 5), 8, 3, 1, 1, 1, False),
        ((1, 1, 9, 6), 3, 3, 1, 1, 1, True),
        ((5, 8, 5, 4), 17, 3, 1, 1, 1, False),
        ((1, 17, 6, 5), 17, 3, 1, 1, 1, True),
        ((3, 7, 5, 6), 8, 3, 2, 1, 1, False),
        ((5, 3, 6, 9), 7, 3, 2, 0, 1, True),
        ((1, 8, 7, 4), 3, 3, 1, 0, 1, False),
        ((3, 1, 4, 5), 8, 3, 1, 2, 1, True),
        ((1, 7, 5, 3), 1, 3, 2, 2, 1, False),
        ((3, 8, 1, 1), 17, 3, 1, 1, 1, False),
        ((1, 8, 5, 35), 8, 3, 1, 1, 1, False),
        ((5, 8, 5, 6), 8, 3, 1, 1, 2, False),
        ((3, 8, 6, 5), 8, 3, 2, 1, 4, True),
        ((3, 7, 5, 4), 7, 3, 1, 1, 7, False),
        ((5, 17, 4, 5), 17, 3, 1, 1, 17, True),
        ((1, 8, 9, 6), 8, 3, 2, 1, 8, False),
        ((3, 3, 5, 7), 6, 3, 1, 1, 3, False),
        ((3, 3, 7, 6), 8, 5, 1, 2, 1, False),
        ((1, 7, 8, 5), 3, 5, 2, 2, 1, True),
        ((5, 1, 6, 7), 7, 5, 1, 0, 1, True),
        ((1, 8, 7, 9), 8, 5, 2, 1, 1, False),
        ((3, 8, 5, 6), 8, 5, 1, 2, 8, False),
        ((1, 8, 6, 7), 8, 5, 2, 2, 2, True),
    ]
    for shape, outputs, kernel, stride, padding, groups, bias in table:
        case = f"conv2d_{dims(shape)}_o{outputs}k{kernel}s{stride}p{padding}g{groups}"
        inputs = randn(case, x=shape, weight=(outputs, shape[1] // groups, kernel, kernel))
        if bias:
            case += "_bias"
            inputs |= randn(case, bias=(outputs,))

        def forward(t: Tensors) -> Tensors:
            return {"y": F.conv2d(t["x"], t["weight"], t.get("bias"), stride, padding, 1, groups)}

        golden.add(
            case,
            "conv2d",
            inputs,
            forward,
            grads=tuple(inputs),
            kernel=kernel,
            stride=stride,
            padding=padding,
            groups=groups,
            bias=bias,
        )


def norms() -> None:
    # (input shape, mean, deviation): a one-pass variance loses digits where the mean is large.
    for shape, mean, deviation in [
        ((1, 1, 5, 7), 2.0, 1.5), ((3, 7, 4, 5), 2.0, 1.5), ((5, 8, 6, 3), -1.0, 1.5),
        ((5, 17, 3, 2), 2.0, 1.5), ((3, 8, 1, 1), 0.0, 1.0), ((3, 3, 7, 5), 8.0, 0.5),
    ]:  # fmt: skip
        for training in (True, False):
            case = f"batch_norm_{'train' if training else 'eval'}_{dims(shape)}"
            channel = (shape[1],)
            inputs = randn(case, x=shape, weight=channel, bias=channel, running_mean=channel)
            inputs["x"] = inputs["x"] * deviation + mean
            inputs |= {"running_var": randn(case + "/var", v=channel)["v"].abs() + 0.5}

            def batch_norm(t: Tensors) -> Tensors:
                mean, var = t["running_mean"].clone(), t["running_var"].clone()
                y = F.batch_norm(t["x"], mean, var, t["weight"], t["bias"], training, 0.1, 1e-5)
                return {"y": y} | ({"running_mean": mean, "running_var": var} if training else {})

            golden.add(
                case,
                "batch_norm",
                inputs,
                batch_norm,
                grads=("x", "weight", "bias"),
                training=training,
                momentum=0.1,
                eps=1e-5,
            )
    for shape, groups in [
        ((1, 1, 5, 4), 1), ((3, 3, 4, 5), 3), ((5, 7, 3, 5), 1), ((1, 7, 6, 3), 7),
        ((3, 8, 5, 4), 8), ((5, 8, 3, 4), 2), ((3, 17, 2, 5), 1), ((1, 32, 3, 2), 2),
        ((3, 16, 1, 1), 1),
    ]:  # fmt: skip
        case = f"group_norm_{dims(shape)}_g{groups}"
        inputs = randn(case, x=shape, weight=(shape[1],), bias=(shape[1],))
        inputs["x"] = inputs["x"] * 1.5 + 2.0

        def group_norm(t: Tensors) -> Tensors:
            return {"y": F.group_norm(t["x"], groups, t["weight"], t["bias"], 1e-5)}

        golden.add(
            case, "group_norm", inputs, group_norm, grads=tuple(inputs), groups=groups, eps=1e-5
        )


def over_channels() -> None:
    """Layer norm and RMS norm over the channels of each pixel, as of an image with channels last."""
    # (input shape, mean): 1040 channels are more than a block of sums.
    for shape, mean in [
        ((3, 3, 4, 5), 2.0), ((5, 16, 3, 2), -1.0), ((2, 17, 5, 7), 2.0),
        ((70, 8, 2, 1), 0.5), ((1, 96, 3, 4), 8.0), ((2, 1040, 2, 1), 0.5), ((5, 7), 2.0), ((3, 70), -1.0),
    ]:  # fmt: skip
        channels = (shape[1],)
        case = f"layer_norm_{dims(shape)}"
        inputs = randn(case, x=shape, weight=channels, bias=channels)
        inputs["x"] = inputs["x"] * 1.5 + mean

        def layer_norm(t: Tensors) -> Tensors:
            y = F.layer_norm(t["x"].movedim(1, -1), channels, t["weight"], t["bias"], 1e-5)
            return {"y": y.movedim(-1, 1).contiguous()}

        channel_norms.add(case, "layer_norm", inputs, layer_norm, grads=tuple(inputs), eps=1e-5)
        case = f"rms_norm_{dims(shape)}"
        inputs = randn(case, x=shape, weight=channels)
        inputs["x"] = inputs["x"] * 1.5 + mean

        def rms_norm(t: Tensors) -> Tensors:
            y = F.rms_norm(t["x"].movedim(1, -1), channels, t["weight"], 1e-5)
            return {"y": y.movedim(-1, 1).contiguous()}

        channel_norms.add(case, "rms_norm", inputs, rms_norm, grads=tuple(inputs), eps=1e-5)


def pointwise() -> None:
    for op, function in [("relu", torch.relu), ("sigmoid", torch.sigmoid), ("tanh", torch.tanh)]:
        for shape in [(1, 3, 5, 7), (5, 17, 3, 1), (3, 7)]:
            case = f"{op}_{dims(shape)}"
            inputs = randn(case, x=shape)
            inputs["x"] *= 3.0
            # Exact zeros of both signs, where ReLU has its kink; and saturated inputs of the others.
            inputs["x"].view(-1)[:6] = torch.tensor([0.0, -0.0, 20.0, -20.0, 95.0, -95.0])
            golden.add(case, op, inputs, lambda t: {"y": function(t["x"])}, grads=("x",))
    for shape in [(3, 7, 5, 4), (1, 1, 3, 2)]:
        case = f"add_{dims(shape)}"
        inputs = randn(case, a=shape, b=shape)
        golden.add(case, "add", inputs, lambda t: {"y": t["a"] + t["b"]}, grads=("a", "b"))
    for shape in [(3, 8, 5, 4), (5, 17, 2, 3), (1, 1, 3, 2)]:
        case = f"channel_scale_{dims(shape)}"
        inputs = randn(case, x=shape, s=shape[:2])
        golden.add(
            case, "channel_scale", inputs,
            lambda t: {"y": t["x"] * t["s"][:, :, None, None]}, grads=("x", "s"),
        )  # fmt: skip
    for shape in [(3, 8, 5, 4), (1, 17, 2, 3)]:
        case = f"norm_mix_{dims(shape)}"
        inputs = randn(case, x=shape, y=shape, s=(1,))
        golden.add(
            case, "norm_mix", inputs,
            lambda t: {"y": t["x"] + torch.tanh(t["s"]) * (t["y"] - t["x"])}, grads=("x", "y", "s"),
        )  # fmt: skip


def functions() -> None:
    """Activation functions that `pointwise` lacks, with and without saturated inputs."""
    table: list[tuple[str, Callable[[Tensor], Tensor], dict[str, float]]] = [
        ("leaky_relu", lambda x: F.leaky_relu(x, 0.01), {"negative_slope": 0.01}),
        ("leaky_relu", lambda x: F.leaky_relu(x, 0.3), {"negative_slope": 0.3}),
        ("elu", F.elu, {}),
        ("gelu", F.gelu, {}),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), {}),
        ("silu", F.silu, {}),
        ("softplus", F.softplus, {}),
        ("hard_swish", F.hardswish, {}),
    ]
    for op, function, params in table:
        name = op + "".join(f"_{value}" for value in params.values())
        for shape, wide in [((1, 3, 5, 7), False), ((3, 7), False), ((5, 17, 3, 1), True)]:
            case = f"{name}_{dims(shape)}{'_wide' if wide else ''}"
            inputs = randn(case, x=shape)
            inputs["x"] *= 3.0
            # Zeros of both signs. Saturated inputs are apart, because they raise the tolerance.
            inputs["x"].view(-1)[:2] = torch.tensor([0.0, -0.0])
            if wide:
                inputs["x"].view(-1)[2:8] = torch.tensor([20.0, 20.5, -20.0, 95.0, -95.0, 6.5])
            activations.add(
                case, op, inputs, lambda t: {"y": function(t["x"])}, grads=("x",), **params
            )  # fmt: skip


def pools() -> None:
    for shape in [(1, 1, 4, 6), (3, 7, 5, 8), (5, 3, 7, 5), (1, 17, 2, 3), (3, 8, 6, 4)]:
        case = f"max_pool2d_{dims(shape)}"
        golden.add(
            case, "max_pool2d", randn(case, x=shape),
            lambda t: {"y": F.max_pool2d(t["x"], 2, 2)}, grads=("x",), kernel=2, stride=2,
        )  # fmt: skip
    # Equal values in a window, as after a ReLU: the gradient goes to the first in row order.
    case = "max_pool2d_ties_3x8x5x6"
    inputs = {"x": randn(case, x=(3, 8, 5, 6))["x"].round().clamp(min=0.0)}
    golden.add(
        case, "max_pool2d", inputs,
        lambda t: {"y": F.max_pool2d(t["x"], 2, 2)}, grads=("x",), kernel=2, stride=2,
    )  # fmt: skip
    for shape in [(1, 1, 5, 7), (3, 7, 4, 5), (5, 17, 3, 2), (3, 8, 1, 1)]:
        case = f"global_avg_pool_{dims(shape)}"
        golden.add(
            case, "global_avg_pool", randn(case, x=shape),
            lambda t: {"y": t["x"].mean((2, 3))}, grads=("x",),
        )  # fmt: skip


def linear() -> None:
    for batch, inputs_n, outputs_n, bias in [
        (1, 1, 3, True), (3, 17, 10, True), (5, 8, 7, False), (3, 7, 1, True), (5, 128, 10, True),
        (1, 3, 17, False),
    ]:  # fmt: skip
        case = f"linear_{batch}x{inputs_n}_o{outputs_n}{'_bias' if bias else ''}"
        inputs = randn(case, x=(batch, inputs_n), weight=(outputs_n, inputs_n))
        if bias:
            inputs |= randn(case + "/b", bias=(outputs_n,))
        golden.add(
            case, "linear", inputs,
            lambda t: {"y": F.linear(t["x"], t["weight"], t.get("bias"))},
            grads=tuple(inputs), bias=bias,
        )  # fmt: skip


def blends() -> None:
    """h: host, m: module output, x: the module's input, g: gate, one number per sample."""

    def add(t: Tensors, alpha: float) -> Tensor:
        return t["h"] + alpha * (t["m"] - t["h"])

    def multiply(t: Tensors, alpha: float) -> Tensor:
        return t["h"] * (1.0 + alpha * torch.tanh(t["m"] - t["x"]))

    def gate(t: Tensors, alpha: float) -> Tensor:
        return t["h"] + alpha * t["g"][:, None, None, None] * (t["m"] - t["h"])

    for name, function, names in [
        ("add", add, "hm"), ("multiply", multiply, "hmx"), ("gate", gate, "hmg"),
    ]:  # fmt: skip
        for shape, alpha in [
            ((3, 8, 5, 4), 0.3), ((1, 17, 2, 3), 0.7), ((5, 7, 3, 1), 0.0), ((1, 3, 4, 3), 1.0),
        ]:  # fmt: skip
            case = f"blend_{name}_{dims(shape)}_a{alpha}"
            inputs = {k: randn(f"{case}/{k}", t=shape)["t"] for k in "hmx"}
            if name == "gate":
                inputs["g"] = torch.rand(shape[0], generator=generator(case + "/g"))
            golden.add(
                case,
                f"blend_{name}",
                inputs,
                lambda t: {"y": function(t, alpha)},
                grads=tuple(names),
                alpha=alpha,
            )
    # The value is the host's; the gradient of the module is that at full strength.
    case = "straight_through_3x8x5x4"
    golden.add(
        case, "straight_through", randn(case, h=(3, 8, 5, 4), m=(3, 8, 5, 4)),
        lambda t: {"y": t["h"] + (t["m"] - t["m"].detach())}, grads=("h", "m"),
    )  # fmt: skip


def losses() -> None:
    for batch, classes, scale in [(1, 10, 1.0), (3, 7, 1.0), (5, 10, 4.0), (5, 3, 60.0)]:
        case = f"softmax_cross_entropy_{batch}x{classes}_scale{scale:.0f}"
        inputs = randn(case, logits=(batch, classes))
        inputs["logits"] *= scale
        labels = torch.randint(classes, (batch,), generator=generator(case + "/labels"))
        inputs["labels"] = labels.float()

        def forward(t: Tensors) -> Tensors:
            labels = t["labels"].long()
            correct = (t["logits"].argmax(1) == labels).sum().to(t["logits"].dtype)
            return {"loss": F.cross_entropy(t["logits"], labels)[None], "correct": correct[None]}

        golden.add(
            case, "softmax_cross_entropy", inputs, forward,
            grads=("logits",), through="loss", reduction="mean",
        )  # fmt: skip


def optimiser() -> None:
    """Three steps of SGD from given gradients; and clipping of a group by its joint norm."""
    for momentum, decay in [(0.9, 5e-4), (0.9, 0.0), (0.0, 0.0)]:
        case = f"sgd_m{momentum}_d{decay}"
        inputs = randn(case, param=(17,), grad0=(17,), grad1=(17,), grad2=(17,))

        def sgd(t: Tensors) -> Tensors:
            param = t["param"].clone().requires_grad_()
            steps = torch.optim.SGD([param], lr=0.01, momentum=momentum, weight_decay=decay)
            for i in range(3):
                param.grad = t[f"grad{i}"].clone()
                steps.step()
            return {"y": param.detach()}

        golden.add(case, "sgd", inputs, sgd, lr=0.01, momentum=momentum, weight_decay=decay)
    for scale in (0.01, 3.0):
        case = f"clip_grad_norm_scale{scale}"
        inputs = {k: v * scale for k, v in randn(case, a=(7, 3), b=(17,)).items()}

        def clip(t: Tensors) -> Tensors:
            group = {k: v.clone().requires_grad_() for k, v in t.items()}
            for k, v in group.items():
                v.grad = t[k].clone()
            norm = torch.nn.utils.clip_grad_norm_(group.values(), 1.0)
            clipped = {k: v.grad for k, v in group.items() if v.grad is not None}
            return clipped | {"norm": norm[None]}

        golden.add(case, "clip_grad_norm", inputs, clip, through="norm", max_norm=1.0)


def flatten() -> None:
    for shape in [(3, 5, 4, 3), (1, 1, 3, 5), (5, 17, 1, 1), (3, 8, 1, 7), (2, 18, 5, 6)]:
        case = f"flatten_{dims(shape)}"
        windows.add(
            case, "flatten", randn(case, x=shape), lambda t: {"y": t["x"].flatten(1)}, grads=("x",)
        )  # fmt: skip


def pooling_windows() -> None:
    """Padding, strides, windows that are not square; ties go to the first in row order."""
    Pair = tuple[int, int]
    table: list[tuple[tuple[int, int, int, int], Pair, Pair, Pair]] = [
        ((3, 5, 7, 6), (3, 3), (2, 2), (1, 1)),
        ((1, 17, 5, 4), (2, 2), (1, 1), (1, 1)),
        ((5, 8, 1, 13), (1, 3), (1, 2), (0, 1)),
        ((3, 3, 6, 5), (4, 2), (3, 1), (2, 1)),
        ((2, 9, 7, 9), (3, 2), (3, 2), (0, 0)),
        ((1, 2, 18, 17), (17, 17), (2, 3), (8, 4)),
    ]
    for shape, kernel, stride, padding in table:
        about = {"kernel": kernel, "stride": stride, "padding": padding}
        name = f"{dims(shape)}_k{dims(kernel)}s{dims(stride)}p{dims(padding)}"
        inputs = {"x": randn(f"max_pool2d_{name}", x=shape)["x"].mul(4).round() / 4 - 2}
        windows.add(
            f"max_pool2d_{name}", "max_pool2d", inputs,
            lambda t: {"y": F.max_pool2d(t["x"], kernel, stride, padding)}, grads=("x",), **about,
        )  # fmt: skip
        windows.add(
            f"avg_pool2d_{name}", "avg_pool2d", randn(f"avg_pool2d_{name}", x=shape),
            lambda t: {"y": F.avg_pool2d(t["x"], kernel, stride, padding)}, grads=("x",), **about,
        )  # fmt: skip
    for shape in [(3, 7, 4, 5), (2, 3, 17, 16), (5, 9, 1, 1)]:
        case = f"global_max_pool_{dims(shape)}"
        windows.add(
            case, "global_max_pool", randn(case, x=shape),
            lambda t: {"y": t["x"].amax((2, 3))}, grads=("x",),
        )  # fmt: skip


def joins() -> None:
    for shape, widths in [((3, 4, 5), (2, 7, 1)), ((1, 2, 3), (17, 8, 5)), ((5, 1, 1), (3, 8, 2))]:
        batch, *image = shape
        case = f"concat_{dims(shape)}_c{dims(widths)}"
        parts = dict(zip("abc", [(batch, c, *image) for c in widths], strict=True))
        windows.add(
            case, "concat", randn(case, **parts),
            lambda t: {"y": torch.cat([t["a"], t["b"], t["c"]], 1)}, grads=("a", "b", "c"),
        )  # fmt: skip
    for shape in [(3, 7, 5, 4), (1, 1, 3, 2), (5, 9)]:
        case = f"multiply_{dims(shape)}"
        windows.add(
            case, "multiply", randn(case, a=shape, b=shape),
            lambda t: {"y": t["a"] * t["b"]}, grads=("a", "b"),
        )  # fmt: skip


def dilated() -> None:
    """Dilated kernels, kernels of unequal height and width, and signals of one row."""
    # (input shape, output channels, kernel, stride, padding, groups, dilation, bias)
    table = [
        ((3, 3, 9, 7), 8, (3, 3), (1, 1), (2, 2), 1, (2, 2), True),
        ((2, 8, 8, 6), 8, (3, 3), (1, 1), (1, 1), 1, (2, 2), False),
        ((5, 8, 1, 20), 6, (1, 3), (1, 1), (0, 4), 1, (1, 4), True),
        ((3, 6, 9, 8), 4, (3, 2), (2, 2), (2, 1), 2, (2, 3), True),
        ((2, 17, 8, 9), 17, (3, 3), (2, 1), (3, 2), 17, (3, 2), False),
        ((1, 7, 5, 11), 3, (2, 5), (1, 3), (0, 2), 1, (1, 2), True),
    ]
    for shape, outputs, kernel, stride, padding, groups, dilation, bias in table:
        case = f"conv2d_{dims(shape)}_o{outputs}k{dims(kernel)}s{dims(stride)}p{dims(padding)}"
        case += f"g{groups}d{dims(dilation)}"
        inputs = randn(case, x=shape, weight=(outputs, shape[1] // groups, *kernel))
        if bias:
            inputs |= randn(case + "_bias", bias=(outputs,))

        def forward(t: Tensors) -> Tensors:
            bias = t.get("bias")
            y = F.conv2d(t["x"], t["weight"], bias, stride, padding, dilation, groups)
            return {"y": y}

        windows.add(
            case, "conv2d", inputs, forward, grads=tuple(inputs), kernel=kernel, stride=stride,
            padding=padding, groups=groups, dilation=dilation, bias=bias,
        )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    sections = (conv2d, norms, pointwise, functions, pools, linear, blends, losses, optimiser)
    for section in sections:
        section()
    golden.write()
    for section in (flatten, pooling_windows, joins, dilated):
        section()
    windows.write()
    activations.write()
    over_channels()
    channel_norms.write()
