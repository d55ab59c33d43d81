"""Values of a traced ``torch.nn.Module``, each with the layer of a host that computes it. Requires
``torch``."""

import copy
import math
import operator
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from . import nn as layers
from ._operations import FUNCTIONS, METHODS, MODULES, Call, Operation
from .errors import SettingError
from .nn import Layer

#: Folders whose frames are left out of places: they are not a user's.
SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
#: The join of a function of two tensors.
JOINS: dict[Any, str] = {
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    "add": "add",
    "add_": "add",
    operator.mul: "multiply",
    operator.imul: "multiply",
    torch.mul: "multiply",
    torch.multiply: "multiply",
    "mul": "multiply",
    "mul_": "multiply",
    "multiply": "multiply",
}
CONCATS = (torch.cat, torch.concat, torch.concatenate)
#: Functions that only change the shape, such as an image to a vector.
SHAPES = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze)
SHAPE_METHODS = ("flatten", "reshape", "squeeze", "unsqueeze", "view")
#: Methods that repeat values along new axes.
EXPANSIONS = ("expand", "expand_as")
#: Dropout that no layer stands for, except in evaluation mode.
DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT_FUNCTIONS = (
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
)
#: Layers after which a value is a vector.
VECTORS = (layers.Flatten, layers.GlobalAvgPool, layers.GlobalMaxPool, layers.Linear)
#: Supported modules without an entry in ``MODULES``: they keep the values of their input.
UNCHANGED = (nn.Identity, nn.Flatten, *DROPOUTS)
#: Methods that return a tensor of the same values.
COPIES = ("clone", "contiguous")
NO_COUNTERPART = "use one that docs/hosts.md has a layer for"


@dataclass(eq=False)
class Value:
    """A tensor of a traced module: the input, the output of a layer, or a join of other values."""

    #: Unique name of letters, digits and ``_``.
    name: str
    #: Module path and line of source, for errors.
    place: str
    inputs: "list[Value]" = field(default_factory=list)
    #: The layer after the one input, or ``None`` for joins and the input of the module.
    layer: Layer | None = None
    join: str | None = None
    #: Whether it is a vector for hosts. For PyTorch it may be an image of one pixel.
    vector: bool = False
    #: Names of the slots after the value.
    slots: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Traced:
    """The values of a traced module in topological order, the input first and the logits last."""

    values: list[Value]
    #: Parameters and buffers by name.
    tensors: dict[str, Any]
    #: Number of logits.
    classes: int


def refusal(place: str, got: str, expected: str, remedy: str) -> SettingError:
    """The error for a part of a module that no layer stands for."""
    return SettingError(f"{place}: got {got}, expected {expected}", (), remedy, 2)


class Tracer(fx.Tracer):
    """Records the output of every submodule, and where tracing failed."""

    record_stack_traces = True

    def __init__(self) -> None:
        super().__init__()
        #: Outputs by module path, one for each call.
        self.outputs: dict[str, list[Any]] = {}
        #: Path of the module in which tracing failed.
        self.failed: str | None = None

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a submodule."""
        path = self.path_of_module(m)
        try:
            output = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = path if self.failed is None else self.failed
            raise
        self.outputs.setdefault(path, []).append(output)
        return output


class Shapes(fx.Interpreter):
    """Computes every node, and keeps the shapes of tensors in ``node.meta["shape"]``."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        # The interpreter would append a traceback to the message of an error.
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        try:
            value = super().run_node(n)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            remedy = "give an example that the module accepts, in float32"
            raise refusal(place_of(n), got, "a result for the example", remedy) from error
        n.meta["shape"] = tuple(value.shape) if isinstance(value, Tensor) else None
        return value


def traced(module: nn.Module, example: Tensor, slots: Sequence[str]) -> Traced:
    """Traces a module, and reads it as values."""
    own, tracer = copied(module), Tracer()
    try:
        graph = tracer.trace(own)
    except Exception as error:
        raise _untraced(module, tracer, error) from error
    reader = Reader(own, graph, example, _slots(tracer, slots))
    reader.check_modules()
    # Modes are read before: dropout is a layer only in training mode.
    training = {path for path, part in own.named_modules() if part.training}
    Shapes(fx.GraphModule(own.eval(), graph)).run(example)
    return reader.read(training)


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module, so that nothing changes the module itself."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        remedy = "give a module that `copy.deepcopy` copies"
        raise refusal(f"`{type(module).__name__}`", got, "a copy", remedy) from error


def _untraced(module: nn.Module, tracer: Tracer, error: Exception) -> SettingError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(SKIPPED)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    place = f"`{tracer.failed or type(module).__name__}`{where}"
    expected = "a forward of one tensor without control flow that depends on it"
    remedy = "write the forward without `if`, `for` or `len` of a tensor's values or shape"
    return refusal(place, f"{type(error).__name__}: {error}", expected, remedy)


def _slots(tracer: Tracer, slots: Sequence[str]) -> dict[str, list[str]]:
    """Names of slots, by the name of the node that each slot follows."""
    found: dict[str, list[str]] = {}
    for path in slots:
        outputs = tracer.outputs.get(path, [])
        if len(outputs) != 1 or not isinstance(outputs[0], fx.Proxy):
            calls = f"{path!r}, which has {len(outputs)} outputs in a forward"
            called = [p for p, o in tracer.outputs.items() if len(o) == 1]
            expected = f"paths of submodules with one tensor as output, such as {short(called)}"
            raise refusal("`slots`", calls, expected, "give the path of a submodule")
        found.setdefault(outputs[0].node.name, []).append(path.replace(".", "_"))
    return found


def place_of(node: fx.Node) -> str:
    """Module path, operation and line of source of a node."""
    stack = list(node.meta.get("nn_module_stack") or {})
    target = getattr(node.target, "__name__", node.target)
    if node.op == "call_module":
        name = f"`{node.target}`"
    else:
        name = f"`{stack[-1]}`: `{target}`" if stack else f"`{target}`"
    frames = re.findall(r'File "(.*?)", line (\d+)', node.stack_trace or "")
    own = [frame for frame in frames if not frame[0].startswith(SKIPPED)]
    return f"{name} ({Path(own[-1][0]).name}:{own[-1][1]})" if own else name


class Reader:
    """Reads the nodes of a graph as values."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, example: Tensor, slots: Mapping[str, list[str]]
    ) -> None:
        self.root, self.graph, self.example, self.slots = root, graph, example, slots
        self.needed, self.output = self._needed()
        self.values: dict[fx.Node, Value] = {}
        self.order: list[Value] = []
        self.tensors: dict[str, Any] = {}
        #: Names of tensors by address.
        self.addresses: dict[int, str] = {}
        #: Vectors that are repeated over the pixels of an image, to be multiplied by it.
        self.expanded: set[fx.Node] = set()
        #: Concatenations by their parts.
        self.concats: dict[tuple[Value, ...], Value] = {}

    def check_modules(self) -> None:
        """Checks the types of all modules on which the output depends, and of their tensors."""
        for node in self.graph.nodes:
            if node.op != "call_module" or node not in self.needed:
                continue
            module = self.root.get_submodule(node.target)
            if type(module) not in (*MODULES, *UNCHANGED):
                got = f"an unsupported module {type(module).__name__}"
                raise refusal(place_of(node), got, "a module that a layer stands for", NO_COUNTERPART)
            for name, tensor in module.state_dict().items():
                kind = torch.int64 if name == "num_batches_tracked" else torch.float32
                if tensor.dtype != kind:
                    got, expected = f"`{name}` of {tensor.dtype}", str(kind).removeprefix("torch.")
                    remedy = "convert the module, such as by `module.float()`"
                    raise refusal(place_of(node), got, expected, remedy)

    def read(self, training: set[str]) -> Traced:
        """Reads everything that the output depends on. ``training`` has the paths of the modules in
        training mode."""
        for node in self.graph.nodes:
            # Other nodes are numbers, such as the batch size; as operands of layers they are refused.
            tensor = node.meta.get("shape") is not None
            operation = node.op == "call_module" or node.target in FUNCTIONS
            if node not in self.needed or not (tensor or operation):
                continue
            value = self._value(node, training)
            value.slots += self.slots.get(node.name, [])
            self.values[node] = value
        logits = self._of(self.output, self.output.args[0])
        shape = self._shape(self.output.args[0])
        if len(shape) != 2:
            got, images = f"an output of shape {shape}", len(self.example)
            expected = f"logits ({images}, classes) for {images} images"
            remedy = "end with global pooling or flatten, and a linear layer"
            raise refusal(logits.place, got, expected, remedy)
        if isinstance(logits.layer, layers.Linear):
            logits.layer.out = "classes"
        names = {node.name for node in self.values}
        for node, [path, *_] in self.slots.items():
            if node not in names:
                got, remedy = f"{path!r}, whose output is not used", "leave it out"
                raise refusal("`slots`", got, "submodules that the logits depend on", remedy)
        return Traced(self.order, self.tensors, shape[1])

    def _needed(self) -> tuple[set[fx.Node], fx.Node]:
        [output] = [node for node in self.graph.nodes if node.op == "output"]
        needed, todo = set(), list(output.all_input_nodes)
        while todo:
            if (node := todo.pop()) not in needed:
                needed.add(node)
                todo += node.all_input_nodes
        return needed, output

    def _of(self, user: fx.Node, item: Any) -> Value:
        """The value of an argument."""
        if isinstance(item, fx.Node) and item in self.values:
            return self.values[item]
        got = f"`{item.name}`" if isinstance(item, fx.Node) else short(item)
        remedy = "give every operation tensors that depend on the images"
        raise refusal(place_of(user), f"{got} as an operand", "a tensor of the network", remedy)

    def _shape(self, item: Any) -> tuple[int, ...]:
        """The shape of an argument that is a value."""
        shape: tuple[int, ...] = item.meta["shape"]
        return shape

    def _value(self, node: fx.Node, training: set[str]) -> Value:
        place, target = place_of(node), node.target
        if node.op == "placeholder":
            if self.order:
                got = f"a second input `{target}`"
                raise refusal(place, got, "images alone", "give a module of one input")
            sample = self._add(node, [])
            if len(node.meta["shape"]) > 2:
                return sample
            # Hosts have vectors as images of one pixel.
            vector = Value(f"{node.name}_vector", place, [sample], layers.Flatten(), vector=True)
            self.order.append(vector)
            return vector
        if node.op == "get_attr":
            remedy = "use a module such as nn.Conv2d, nn.Linear or nn.BatchNorm2d"
            raise refusal(place, f"the tensor `{target}` itself", "tensors of layers", remedy)
        if node.op == "call_module":
            return self._module(node, place, training)
        if target in JOINS:
            return self._join(node, JOINS[target])
        if target in CONCATS:
            return self._concat(node)
        first = self._of(node, _first(node))
        if target in SHAPES or node.op == "call_method" and target in SHAPE_METHODS:
            return self._reshaped(node, first)
        if target is operator.getitem:
            return self._indexed(node, first)
        if node.op == "call_method" and target in EXPANSIONS:
            return self._expanded(node, first)
        if node.op == "call_method" and target in COPIES:
            return first
        if target in DROPOUT_FUNCTIONS:
            return self._dropout(node, first)
        table: Mapping[Any, Operation] = METHODS if node.op == "call_method" else FUNCTIONS
        operation = table.get(target)
        if operation is None:
            kind = "method" if node.op == "call_method" else "function"
            expected = "an operation that a layer stands for"
            raise refusal(place, f"an unsupported {kind}", expected, NO_COUNTERPART)
        settings = self._bound(node, operation.settings)
        return self._applied(node, first, operation, settings)

    def _bound(self, node: fx.Node, known: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a function, with defaults. The first argument is the tensor."""
        given = dict(node.kwargs)
        rest = node.args[1:]
        if not node.args:
            given.pop("input", None)
        settings = {**known, **dict(zip(known, rest, strict=False)), **given}
        if len(rest) > len(known) or settings.keys() - known.keys():
            got = f"arguments {short(rest)} and {short(given)}"
            expected = f"at most {', '.join(known) or 'a tensor'}"
            raise refusal(place_of(node), got, expected, "leave out the others")
        return settings

    def _module(self, node: fx.Node, place: str, training: set[str]) -> Value:
        path = str(node.target)
        module = self.root.get_submodule(path)
        x = self._of(node, _first(node))
        if type(module) is nn.Identity:
            return x
        if isinstance(module, DROPOUTS):
            if path in training and module.p > 0:
                raise self._drops(place, f"{type(module).__name__} in training mode")
            return x
        if type(module) is nn.Flatten:
            return self._reshaped(node, x)
        operation = MODULES[type(module)]
        settings = {name: getattr(module, name) for name in operation.settings}
        if "training" in settings:
            settings["training"] = path in training
        value = self._applied(node, x, operation, settings)
        if module.state_dict():
            # The layer has tensors, and so a name.
            setattr(value.layer, "name", path)
        self._keep(place, path, module)
        return value

    def _drops(self, place: str, got: str) -> SettingError:
        remedy = "use nn.Dropout, call `module.eval()` before, or set p=0"
        return refusal(place, got, "dropout of single elements", remedy)

    def _dropout(self, node: fx.Node, x: Value) -> Value:
        name = getattr(node.target, "__name__", str(node.target))
        training = "alpha" not in name
        settings = self._bound(node, {"p": 0.5, "training": training, "inplace": False})
        if settings["training"] and settings["p"]:
            raise self._drops(place_of(node), f"{name} in training mode")
        return x

    def _keep(self, place: str, path: str, module: nn.Module) -> None:
        """Keeps copies of a module's tensors."""
        for name, tensor in module.state_dict().items():
            full = f"{path}.{name}"
            known = self.addresses.setdefault(tensor.data_ptr(), full)
            if full in self.tensors or known != full:
                got = f"`{full}` used twice" if known == full else f"`{full}`, which is `{known}`"
                remedy = "give each use a module and parameters of its own"
                raise refusal(place, got, "parameters that are used once", remedy)
            self.tensors[full] = tensor.detach().cpu().numpy().copy()

    def _applied(
        self, node: fx.Node, x: Value, operation: Operation, settings: Mapping[str, Any]
    ) -> Value:
        """The value after a layer."""
        call = Call(settings, self._shape(_first(node)), x.vector)
        layer = operation.layer(call)
        if call.problem is not None:
            got, expected = call.problem
            remedy = "change the argument, or use another layer"
            raise refusal(place_of(node), got, expected, remedy)
        return x if layer is None else self._add(node, [x], layer=layer)

    def _add(self, node: fx.Node, inputs: list[Value], **keys: Any) -> Value:
        shape = node.meta["shape"]
        vector = isinstance(keys.get("layer"), VECTORS) or any(x.vector for x in inputs)
        vector = vector and all(side == 1 for side in shape[2:])
        value = Value(node.name, place_of(node), inputs, vector=vector, **keys)
        if shape[:1] != (len(self.example),):
            got, expected = f"an output of shape {shape}", f"{len(self.example)} images first"
            raise refusal(value.place, got, expected, "leave the first dimension as it is")
        self.order.append(value)
        return value

    def _join(self, node: fx.Node, join: str) -> Value:
        settings = self._bound(node, {"other": None} | ({"alpha": 1} if join == "add" else {}))
        operands = [_first(node), settings["other"]]
        inputs = [self._of(node, operand) for operand in operands]
        if settings.get("alpha", 1) != 1:
            got = f"alpha={short(settings['alpha'])}"
            raise refusal(place_of(node), got, "alpha=1", "scale the weights instead")
        one, other = (self._shape(operand) for operand in operands)
        pixel = any(all(side == 1 for side in shape[2:]) for shape in (one, other))
        scales = join == "multiply" and len(one) == len(other) and one[:2] == other[:2] and pixel
        if one != other and not scales:
            expected = "one shape, or an image times one value for each of its channels"
            remedy = "join values of one shape; hosts broadcast nothing else"
            raise refusal(place_of(node), f"shapes {one} and {other}", expected, remedy)
        if self.expanded.issuperset(operands):
            raise self._repeats(node, "a product of values that are all repeated")
        return self._add(node, inputs, join=join)

    def _concat(self, node: fx.Node) -> Value:
        known = {"tensors": (), "dim": 0}
        given = dict(zip(known, node.args, strict=False))
        settings = {**known, **given, **node.kwargs}
        parts: Any = settings["tensors"]
        inputs = [self._of(node, part) for part in parts]
        rank, dim = len(self._shape(parts[0])), settings["dim"]
        if settings.keys() - known.keys() or dim not in (1, 1 - rank):
            got = f"arguments {short({**given, **node.kwargs})}"
            raise refusal(place_of(node), got, "dim=1", "concatenate channels or features")
        if len(inputs) == 1:
            return inputs[0]
        key = tuple(inputs)
        # If a shorter concatenation of the first inputs exists, as in dense blocks, it is reused.
        for count in range(len(key) - 1, 1, -1):
            start = self.concats.get(key[:count])
            if start is not None and not start.slots:
                inputs = [start, *inputs[count:]]
                break
        value = self._add(node, inputs, join="concat")
        self.concats[key] = value
        return value

    def _repeats(self, node: fx.Node, got: str) -> SettingError:
        expected = "one value for each channel, repeated to be multiplied by an image"
        return refusal(place_of(node), got, expected, "multiply without `expand`, or leave it out")

    def _expanded(self, node: fx.Node, x: Value) -> Value:
        """The value before it is repeated over the pixels, which a product with an image implies."""
        before, after = self._shape(_first(node)), self._shape(node)
        pixel = all(side == 1 for side in before[2:])
        multiplied = all(JOINS.get(user.target) == "multiply" for user in node.users)
        if before != after:
            if len(before) != len(after) or before[:2] != after[:2] or not (pixel and multiplied):
                raise self._repeats(node, f"a tensor {before} repeated to {after}")
            self.expanded.add(node)
        return x

    def _indexed(self, node: fx.Node, x: Value) -> Value:
        """A vector as an image of one pixel, such as ``x[:, :, None, None]``."""
        index: Any = node.args[1]
        for part in index if isinstance(index, tuple) else (index,):
            if part not in (None, Ellipsis, slice(None)):
                got = f"the index {short(part)}"
                raise refusal(place_of(node), got, "`:`, `...` or None", "leave the parts together")
        return self._reshaped(node, x)

    def _reshaped(self, node: fx.Node, x: Value) -> Value:
        """A vector of an image or signal; a vector itself may become an image of one pixel and
        back."""
        before, after = self._shape(_first(node)), self._shape(node)
        sizes: Any = node.args[1:] or tuple(node.kwargs.values())
        sizes = sizes[0] if sizes and isinstance(sizes[0], tuple | list) else sizes
        views = node.target in ("view", "reshape", torch.reshape)
        if views and sizes and isinstance(sizes[0], int) and sizes[0] != -1:
            got, expected = f"the fixed size {sizes[0]} of a batch", "the size of the batch"
            raise refusal(place_of(node), got, expected, "write `x.flatten(1)`")
        pixel = all(side == 1 for side in before[2:] + after[2:])
        if before == after or before[:2] == after[:2] and pixel:
            return x
        if len(before) not in (3, 4) or after != (before[0], math.prod(before[1:])):
            kind = "a signal" if len(before) == 3 else "an image"
            remedy = f"hosts turn {kind} into a vector, and nothing else: write `x.flatten(1)`"
            got = f"a tensor {before} as {after}"
            raise refusal(place_of(node), got, f"{kind} as a vector", remedy)
        return self._add(node, [x], layer=layers.Flatten())


def _first(node: fx.Node) -> Any:
    """The first argument of a node."""
    return node.args[0] if node.args else node.kwargs.get("input")
