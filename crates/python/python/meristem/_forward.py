"""The forward pass of a network, with the operations of any array library."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol

from .errors import WeightsError

#: Stages in which a module is part of the network.
BLENDED = ("blending", "holding", "fossilized")
#: Stages in which a module with birth "joint" has alpha 1, whatever its move.
JOINT = ("training", "blending", "holding")
#: ε of all norms.
EPS = 1e-5
#: Layers that are elementwise functions: methods of a :class:`Library` without settings.
FUNCTIONS = (
    "relu",
    "sigmoid",
    "tanh",
    "elu",
    "gelu",
    "gelu_tanh",
    "silu",
    "softplus",
    "hard_swish",
)
#: Sizes along the axis of rows, for layers of signals, which are images of one row.
OF_ROW = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
#: One number for height and width, or one for each.
Size = int | Sequence[int]


def pair(of: Size) -> tuple[int, int]:
    """Height and width."""
    if isinstance(of, int):
        return of, of
    height, width = of
    return height, width


class Library(Protocol):
    """Tensors by name, and operations on images (N, C, H, W), or vectors (N, C) after `mean`, `max`,
    `flatten` and `linear`. A pooling's stride is its window's size unless given."""

    def tensor(self, name: str) -> Any: ...
    def conv2d(
        self,
        x: Any,
        weight: Any,
        padding: Size,
        groups: int,
        *,
        bias: Any = None,
        stride: Size = 1,
        dilation: Size = 1,
    ) -> Any: ...
    def batch_norm(self, x: Any, name: str) -> Any: ...
    def group_norm(self, x: Any, groups: int, weight: Any, bias: Any) -> Any: ...
    def layer_norm(self, x: Any, weight: Any, bias: Any) -> Any: ...
    def rms_norm(self, x: Any, weight: Any) -> Any: ...
    def linear(self, x: Any, weight: Any, bias: Any) -> Any: ...
    def max_pool2d(
        self, x: Any, size: Size, stride: Size | None = None, padding: Size = 0
    ) -> Any: ...
    def avg_pool2d(
        self, x: Any, size: Size, stride: Size | None = None, padding: Size = 0
    ) -> Any: ...
    def mean(self, x: Any) -> Any: ...
    def max(self, x: Any) -> Any: ...
    def flatten(self, x: Any) -> Any: ...
    def concat(self, parts: Sequence[Any]) -> Any: ...
    def multiply(self, a: Any, b: Any) -> Any: ...
    def relu(self, x: Any) -> Any: ...
    def sigmoid(self, x: Any) -> Any: ...
    def tanh(self, x: Any) -> Any: ...
    def leaky_relu(self, x: Any, slope: float) -> Any: ...
    def elu(self, x: Any) -> Any: ...
    def gelu(self, x: Any) -> Any: ...
    def gelu_tanh(self, x: Any) -> Any: ...
    def silu(self, x: Any) -> Any: ...
    def softplus(self, x: Any) -> Any: ...
    def hard_swish(self, x: Any) -> Any: ...
    def dropout(self, x: Any, p: float) -> Any: ...


def image(x: Any) -> Any:
    """An image, or a vector as an image of one pixel, as hosts have it."""
    return x if x.ndim == 4 else x[:, :, None, None]


def vector(library: Library, x: Any) -> Any:
    """A vector, or an image of one pixel as a vector."""
    return x if x.ndim == 2 else library.flatten(x)


def group_norm_groups(channels: int) -> int:
    """Number of groups of a group norm: the largest divisor of ``channels`` among 32, 16, 8, 4, 2, 1
    that leaves at least 16 channels per group, or else the largest divisor among them."""
    dividing = [g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0]
    return next((g for g in dividing if channels // g >= 16), dividing[0])


def forward(
    library: Library, host: Mapping[str, Any], topology: Mapping[str, Any], x: Any
) -> Any:
    """The logits (N, classes) of normalised images (N, C, H, W)."""
    blueprints = {blueprint["name"]: blueprint for blueprint in topology["blueprints"]}
    slots = {slot["slot"]: slot for slot in topology["slots"]}

    def grown(name: str, x: Any) -> Any:
        slot = slots.get(name, {})
        module = slot.get("module") or {}
        joint = module.get("birth") == "joint" and slot["stage"] in JOINT
        if slot.get("stage") not in BLENDED and not joint:
            return x
        if joint and not module["pruning"]:
            module = {**module, "alpha": {"alpha": 1.0}}
        return blend(library, f"slots.{name}", module, blueprints[module["blueprint"]], image(x))

    return vector(library, host_layers(library, host["layers"], grown, {}, x))


def host_layers(
    library: Library,
    layers: Iterable[Any],
    grown: Callable[[str, Any], Any],
    saved: dict[str, Any],
    x: Any,
) -> Any:
    """The output of layers of a host; ``grown`` applies the module of a slot, ``saved`` has the saved
    values by name."""
    for layer in layers:
        match layer:
            case {"slot": {"name": name}}:
                x = grown(name, x)
            case {"conv2d": about}:
                x = conv2d(library, about, x)
            case {"conv1d": about}:
                x = conv2d(library, of_image(about), x)
            case {"batch_norm": {"name": name}}:
                x = library.batch_norm(x, name)
            case {"group_norm": {"name": name, "groups": groups}}:
                weight, bias = (library.tensor(f"{name}.{w}") for w in ("weight", "bias"))
                x = library.group_norm(x, groups, weight, bias)
            case {"layer_norm": {"name": name}}:
                weight, bias = (library.tensor(f"{name}.{w}") for w in ("weight", "bias"))
                x = library.layer_norm(x, weight, bias)
            case {"rms_norm": {"name": name}}:
                x = library.rms_norm(x, library.tensor(f"{name}.weight"))
            case str() if layer in FUNCTIONS:
                x = getattr(library, layer)(x)
            case {"leaky_relu": about}:
                x = library.leaky_relu(x, about["slope"])
            case {"dropout": {"p": p}}:
                x = library.dropout(x, p)
            case {"max_pool2d": about}:
                x = library.max_pool2d(image(x), *window(about))
            case {"max_pool1d": about}:
                x = library.max_pool2d(image(x), *window(of_image(about)))
            case {"avg_pool2d": about}:
                x = library.avg_pool2d(image(x), *window(about))
            case {"avg_pool1d": about}:
                x = library.avg_pool2d(image(x), *window(of_image(about)))
            case "global_avg_pool":
                x = library.mean(image(x))
            case "global_max_pool":
                x = library.max(image(x))
            case "flatten":
                x = library.flatten(x)
            case {"save": {"name": name}}:
                saved[name] = x
            case {"load": {"name": name}}:
                x = saved[name]
            case {"join": {"join": how, "from": names}}:
                x = join(library, how, [x, *(saved[name] for name in names)])
            case {"linear": about}:
                name = about["name"]
                bias = library.tensor(f"{name}.bias") if about.get("bias", True) else None
                x = library.linear(vector(library, x), library.tensor(f"{name}.weight"), bias)
            case {"residual": about}:
                branches = [about["body"], about.get("shortcut", [])]
                body, shortcut = (host_layers(library, b, grown, saved, x) for b in branches)
                x = join(library, "add", [body, shortcut])
            case {"branches": {"join": how, "branches": branches}}:
                ends = [host_layers(library, branch, grown, saved, x) for branch in branches]
                x = join(library, how, ends)
            case other:
                raise WeightsError(f"unknown layer of a host `{other}`")
    return x


def join(library: Library, how: str, values: Sequence[Any]) -> Any:
    """Values joined from first to last. In a product a vector scales the channels of an image."""
    if any(value.ndim == 4 for value in values):
        values = [image(value) for value in values]
    match how:
        case "add":
            return sum(values[1:], values[0])
        case "multiply":
            return reduce(library.multiply, values)
        case "concat":
            return library.concat(values)
        case other:
            raise WeightsError(f"unknown join `{other}`")


def of_image(about: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of signals as one of images of one row."""
    sizes = {key: (row, about[key]) for key, row in OF_ROW.items() if isinstance(about.get(key), int)}
    return {**about, **sizes}


def window(about: Mapping[str, Any]) -> tuple[Size, Size | None, Size]:
    """Kernel, stride and padding of a pool."""
    return about["kernel"], about.get("stride"), about.get("padding", 0)


def conv2d(library: Library, about: Mapping[str, Any], x: Any) -> Any:
    """The output of a convolution of a host."""
    name, kernel = about["name"], pair(about["kernel"])
    dilation = about.get("dilation", 1)
    match about.get("padding", "same"):
        case "same":
            padding: Size = [apart * (k // 2) for k, apart in zip(kernel, pair(dilation), strict=True)]
        case "valid":
            padding = 0
        case size:
            padding = size
    weight = library.tensor(f"{name}.weight")
    return library.conv2d(
        image(x),
        # In a signal the kernel has one row.
        weight if weight.ndim == 4 else weight[:, :, None],
        padding,
        about.get("groups", 1),
        bias=library.tensor(f"{name}.bias") if about.get("bias") else None,
        stride=about.get("stride", 1),
        dilation=dilation,
    )


def blend(
    library: Library, name: str, module: Mapping[str, Any], blueprint: Mapping[str, Any], x: Any
) -> Any:
    """Mixes a module into the host's activation `x`."""
    alpha, output = module["alpha"]["alpha"], grow(library, name, blueprint, x)
    match module["style"]:
        case "linear_add" | "sigmoid_add":
            return x + alpha * (output - x)
        case "linear_multiply":
            return x * (1 + alpha * library.tanh(output - x))
        case "linear_gate":
            gate = library.mean(x)
            for layer in (0, 2):
                weight, bias = (
                    library.tensor(f"{name}.gate.{layer}.{w}") for w in ("weight", "bias")
                )
                gate = library.linear(gate, weight, bias)
                gate = library.relu(gate) if layer == 0 else library.sigmoid(gate)
            return x + alpha * image(gate) * (output - x)
        case other:
            raise WeightsError(f"unknown blending style `{other}`")


def grow(library: Library, name: str, blueprint: Mapping[str, Any], x: Any) -> Any:
    """The output of a module for `x`."""
    y = x
    for i, layer in enumerate(blueprint["layers"]):
        y = apply(library, f"{name}.layers.{i}", layer, y)
    y = image(y)
    match blueprint["join"]:
        case "residual":
            return x + y
        case "tanh_mix":
            return x + library.tanh(library.tensor(f"{name}.mix")) * (y - x)
        case {"channel_scale": {"factor": factor}}:
            return x * (factor * y)
        case other:
            raise WeightsError(f"unknown join `{other}`")


def apply(library: Library, name: str, layer: Any, x: Any) -> Any:
    """The output of a layer of a module."""
    match layer:
        case str() if layer in FUNCTIONS:
            return getattr(library, layer)(x)
        case {"leaky_relu": about}:
            return library.leaky_relu(x, about["slope"])
        case {"dropout": {"p": p}}:
            return library.dropout(x, p)
        case "global_avg_pool":
            return library.mean(image(x))
        case {"conv": about}:
            groups = x.shape[1] if about["depthwise"] else 1
            weight = library.tensor(f"{name}.weight")
            # In a signal the kernel has one row.
            rows, columns = weight.shape[2:]
            return library.conv2d(image(x), weight, (rows // 2, columns // 2), groups)
        case {"group_norm": _}:
            weight, bias = (library.tensor(f"{name}.{w}") for w in ("weight", "bias"))
            return library.group_norm(x, group_norm_groups(x.shape[1]), weight, bias)
        case {"linear": about}:
            bias = library.tensor(f"{name}.bias") if about["bias"] else None
            return library.linear(vector(library, x), library.tensor(f"{name}.weight"), bias)
        case other:
            raise WeightsError(f"unknown layer `{other}`")
