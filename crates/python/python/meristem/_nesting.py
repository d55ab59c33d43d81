"""Lists of layers from values that depend on each other.

A description of a host is a list in which each layer reads the value of the layer before it. Other
values are read in three ways: all branches of a layer read the value before that layer, joins read
saved values, and a layer may follow a :class:`Load` of a saved value. All paths to a value run through
its immediate dominator. The values between the two become the layers of branches. A value that
already is in another branch is saved there.
"""

from dataclasses import dataclass

from . import nn as layers
from ._trace import Value
from .nn import Layer


@dataclass
class Mark(layers.Layer):
    """The place after a value, at which it is saved if it is read elsewhere."""

    value: Value


def nested(values: list[Value]) -> list[Layer]:
    """The layers from the first value to the last."""
    nesting = Nesting(values)
    first = values[0]
    start: list[Layer] = [*map(layers.Slot, first.slots), Mark(first)]
    return nesting.saved_in(start + nesting.between(first, values[-1]))


class Nesting:
    """Layers of values, each of which occurs once."""

    def __init__(self, values: list[Value]) -> None:
        self.at = {value: i for i, value in enumerate(values)}
        #: The immediate dominator of each value: the nearest earlier value on every path to it.
        self.dominator: dict[Value, Value] = {}
        #: All values that a value depends on, as bits of their positions.
        self.before = [0] * len(values)
        for value in values:
            for source in value.inputs:
                self.before[self.at[value]] |= self.before[self.at[source]] | 1 << self.at[source]
            if value.inputs:
                self.dominator[value] = self._meeting(value.inputs)
        #: Values that have layers.
        self.done = {values[0]}
        #: Values that need a :class:`Save`: some layer reads them without directly following them.
        self.saved: set[Value] = set()

    def _meeting(self, values: list[Value]) -> Value:
        meeting, *others = values
        for other in others:
            while meeting is not other:
                if self.at[meeting] > self.at[other]:
                    meeting = self.dominator[meeting]
                else:
                    other = self.dominator[other]
        return meeting

    def between(self, start: Value, end: Value) -> list[Layer]:
        """The layers after ``start`` up to ``end``; ``start`` dominates ``end``."""
        path = []
        at = end
        while at is not start:
            path.append(at)
            at = self.dominator[at]
        found: list[Layer] = []
        for value in reversed(path):
            if value in self.done:
                self.saved.add(value)
                found = [layers.Load(value.name)]
                continue
            if value.layer is not None:
                found.append(value.layer)
            else:
                found += self.joined(value)
            self.done.add(value)
            found += [*map(layers.Slot, value.slots), Mark(value)]
        return found

    def joined(self, value: Value) -> list[Layer]:
        """The layers of a join, after its dominator."""
        start, join = self.dominator[value], value.join or ""
        branches: list[Value] = []
        others: list[Value] = []
        in_order = True
        for source in value.inputs:
            elsewhere = source is not start and (
                source in self.done or source in branches or self._inside(source, value.inputs)
            )
            in_order = in_order and (elsewhere or not others)
            (others if elsewhere else branches).append(source)
        if not branches or join == "concat" and not in_order:
            # A join reads saved values after its other operands: in another order each is a branch.
            branches, others = value.inputs, []
        self.saved.update(others)
        ends = [self.between(start, end) for end in branches]
        found = ends[0] if len(ends) == 1 else [_container(ends, join)]
        names = [other.name for other in others]
        return [*found, layers.Join(*names, join=join)] if others else found

    def _inside(self, source: Value, values: list[Value]) -> bool:
        """Whether another one of the values depends on ``source``."""
        return any(self.before[self.at[value]] >> self.at[source] & 1 for value in values)

    def saved_in(self, found: list[Layer]) -> list[Layer]:
        """The layers with saves of the values that are read elsewhere, in place of marks."""
        kept: list[Layer] = []
        for layer in found:
            if isinstance(layer, Mark):
                if layer.value in self.saved:
                    kept.append(layers.Save(layer.value.name))
                continue
            if isinstance(layer, layers.Residual):
                layer.body = self.saved_in(layer.body)
                layer.shortcut = self.saved_in(layer.shortcut)
            if isinstance(layer, layers.Branches):
                layer.branches = [self.saved_in(branch) for branch in layer.branches]
            kept.append(layer)
        return kept


def _container(ends: list[list[Layer]], join: str) -> Layer:
    """A residual layer for a sum of a longer and a shorter branch, or else branches."""
    if join == "add" and len(ends) == 2:
        one, other = ends
        if len(one) > len(other) or other and not one:
            return layers.Residual(*(one or other), shortcut=other if one else [])
    return layers.Branches(*ends, join=join)
