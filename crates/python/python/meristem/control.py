"""Inputs and actions of controllers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from ._arguments import U32_MAX, index, refused, sequence
from .errors import ControllerError

#: ``None`` is WAIT. A mapping has the keys of a line of a script (``docs/control.md``), such as
#: ``{"op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_small"}`` or
#: ``{"op": "WIDEN", "layer": "blocks.1.conv", "by": 4}``. A sequence has one integer for each of the
#: eight heads.
Action = Union[Mapping[str, object], Sequence[int], "npt.NDArray[np.integer[Any]]", None]


@dataclass(frozen=True)
class Slot:
    """A slot of a host."""

    #: Name, such as ``r0c1``.
    slot: str
    #: Channels of the tensor at the slot.
    channels: int
    #: ``dormant``, ``germinated``, ``training``, ``blending``, ``holding``, ``fossilized``, …
    stage: str
    #: Steps in this stage.
    stage_steps: int
    #: Weight of the module's output in the host, 0..1.
    alpha: float
    #: Blueprint of the module; ``None`` in an empty slot.
    blueprint: str | None
    #: Steps since the module germinated.
    age: int
    #: Contribution in percentage points of the control score, measured in this step; ``None`` if it
    #: was not measured: without a control split, at alpha 0, or for a fossilized module. In a loop
    #: of your own it is the contribution in the last step with a score.
    contribution: float | None
    #: Gradient health in this step, 0..1; ``None`` if it was not measured.
    gradient_health: float | None
    #: Whether the gate to the next stage would pass now.
    gate_passes: bool
    #: Legal operations in this slot.
    ops: list[str]
    #: Blueprints that may germinate in this slot.
    blueprints: list[str]


@dataclass(frozen=True)
class Layer:
    """A layer of a host that can become wider."""

    #: Name, such as ``blocks.1.conv``.
    layer: str
    #: Output features.
    features: int
    #: Slots that become wider with the layer; WIDEN is illegal while one of them has a module.
    slots: list[str]


@dataclass(frozen=True)
class Env:
    """An env after training and measurement, before its action."""

    #: Number of the env, from 0.
    env: int
    #: Step of the episode, from 0.
    step: int
    #: Steps of an episode.
    episode_steps: int
    #: Control score after each step since the start of the episode or the last rollback, the current
    #: one last, 0..1: accuracy, micro-F1 or R², of which values below 0 are 0. In the step of a
    #: rollback it is the score of the restored host.
    scores: list[float]
    #: Control loss after each of these steps.
    losses: list[float]
    #: Current control loss of the bare twin; ``None`` without a twin.
    twin_loss: float | None
    #: Training loss of each step since the start of the episode or the last rollback, the current
    #: one last. Empty in the step of a rollback.
    train_losses: list[float]
    #: The last operation, and whether it succeeded; ``None`` in the first step of the episode and in
    #: the step of a rollback.
    last: tuple[str, bool] | None
    #: The S enabled slots, in the order of the slot head.
    slots: list[Slot]
    #: float32: the 23 + 31·S inputs of a policy, then each slot's blueprint, one-hot with "none"
    #: last.
    observation: "npt.NDArray[np.float32]"
    #: int8 (6): the legal operations.
    op_mask: "npt.NDArray[np.int8]"
    #: int8 (6, S): the slots in which each operation is legal.
    slot_mask: "npt.NDArray[np.int8]"
    #: int8 (S, blueprints): the blueprints that may germinate in each slot.
    blueprint_mask: "npt.NDArray[np.int8]"
    #: Layers that WIDEN can give further features.
    layers: list[Layer] = field(default_factory=list)

    @property
    def accuracies(self) -> list[float]:
        """The scores, of a run that classifies: control accuracies, 0..1."""
        return self.scores


#: A function that chooses the action of an env.
Controller = Callable[[Env], Action]

#: Description of the valid actions, for errors.
ACTION = "None, a mapping as in a script, or a whole number for each of the eight heads"

ARRAYS = ("observation", "op_mask", "slot_mask", "blueprint_mask")


def env_of(given: dict[str, Any]) -> Env:
    """Converts the engine's description of an env."""
    arrays = {name: np.from_dlpack(given.pop(name)) for name in ARRAYS}
    slots = [Slot(**slot) for slot in given.pop("slots")]
    layers = [Layer(**layer) for layer in given.pop("layers")]
    return Env(slots=slots, layers=layers, **arrays, **given)


def to_engine(action: Action) -> str | list[int] | None:
    """Converts an action for the engine.

    Raises:
        ControllerError: The value is not an action; for example a choice is not an integer.
    """
    if action is None:
        return None
    if isinstance(action, Mapping):
        try:
            return json.dumps(dict(action), default=_number)
        except (TypeError, ValueError, RecursionError) as error:
            raise refused("action", action, f"{ACTION} ({error})", ControllerError) from None
    choices = []
    for choice in sequence("action", action, ACTION, ControllerError):
        number = index(choice)
        if number is None or not 0 <= number <= U32_MAX:
            raise refused("action", action, ACTION, ControllerError)
        choices.append(number)
    return choices


def _number(value: object) -> object:
    """Converts a numpy scalar for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a value of JSON")


def decide(
    controller: Controller,
) -> Callable[[list[dict[str, Any]]], list[str | list[int] | None]]:
    """Wraps a controller in a function of all envs, which the engine calls once a step."""
    return lambda envs: [to_engine(controller(env_of(env))) for env in envs]
