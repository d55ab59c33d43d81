"""Learners: networks that the program trains with its own loop, without a dataset."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _meristem
from . import weights as files
from ._arguments import index, integer, path, real, refused, sequence
from ._tables import described, numpy_of
from .control import Action, Env, env_of, to_engine
from .errors import ArgumentError, ControllerError, MeristemError, StateError, WeightsError
from .weights import Weights, parse

#: Order of the axes of images in the engine, [N, H, W, C].
CHANNELS_LAST = (0, 2, 3, 1)


#: Most features of a layer.
FEATURES_MAX = 65_536


class Learners:
    """A fleet of networks that grow, trained by the program's own loop.

    The program computes the loss; a training step consists of three calls, for all envs at once or
    for one::

        learners = meristem.Learners(input=4, outputs=2, envs=16, host="mlp:32", blueprints="vectors")
        outputs = learners.forward(inputs)          # [envs, batch, 4] to [envs, batch, 2]
        learners.backward(gradients)                # of the loss, with respect to the outputs
        learners.update()

    Any number of training steps are a step of growth, which :meth:`step` ends. One thread at a time
    may use learners; a concurrent call from another thread raises a ``StateError``.
    """

    def __init__(self, *, input: "int | Sequence[int]", outputs: int, **settings: Any) -> None:
        """Makes networks with fresh weights.

        Args:
            input: Shape of a sample: features, (channels, points) or (channels, rows, columns).
            outputs: Outputs of a network.
            settings: Settings of :func:`meristem.train` for hosts, optimiser, growth and devices.
                ``batch`` is the largest number of samples of a call.

        Raises:
            ArgumentError: ``input`` or ``outputs`` is no size.
            SettingError: A setting that learners do not have, or a value that does not fit.
        """
        sizes = [input] if index(input) is not None else sequence("input", input, "sizes of a sample")
        shape = [integer("input", size, 1, 65_536) for size in sizes]
        if not 1 <= len(shape) <= 3:
            raise refused("input", input, "1 to 3 sizes: features, (channels, points) or (channels, rows, columns)")
        self._attach(_meristem.LearnerLoop(shape, integer("outputs", outputs, 1, 65_536), settings))

    @classmethod
    def resume(cls, file: "str | PathLike[str]", **settings: Any) -> "Learners":
        """The learners that :meth:`checkpoint` wrote; further training has the same bits.

        ``devices``, ``device_memory`` and ``threads`` may be given anew.

        Raises:
            ResumeError: The file cannot be read, is damaged, or is something else.
            SettingError: A setting other than these three, or a value that does not fit.
        """
        learners = cls.__new__(cls)
        learners._attach(_meristem.LearnerLoop.resume(path("file", file), settings))
        return learners

    def _attach(self, loop: _meristem.LearnerLoop) -> None:
        self._loop = loop
        shape, self._outputs, self._envs = loop.shape()
        self._input = tuple(shape)

    def __len__(self) -> int:
        return self._envs

    def forward(self, inputs: Any, env: int | None = None) -> Any:
        """Forward passes in training mode; their activations are kept for :meth:`backward`.

        Batch norm uses the statistics of the batch. If actions are due, all envs WAIT.

        Args:
            inputs: An array [envs, batch, *input], or a list with an array [batch, *input] for each
                env, of numpy, PyTorch or JAX. With ``env``, the array of that env.
            env: The env; all of them without it.

        Returns:
            Outputs, float32: [envs, batch, outputs], or a list, or [batch, outputs].
        """
        envs, arrays = self._given("inputs", inputs, env, self._input)
        return self._shaped(self._loop.forward(envs, arrays), inputs, env)

    def eval(self, inputs: Any, env: int | None = None, without: str | None = None) -> Any:
        """Forward passes in evaluation mode, as :meth:`forward`.

        Batch norm uses the running statistics, which stay as they are; nothing is kept. With
        ``without``, the name of a slot, the module there is left out.
        """
        envs, arrays = self._given("inputs", inputs, env, self._input)
        slot = None if without is None else self._slot("without", without)
        return self._shaped(self._loop.eval(envs, arrays, slot), inputs, env)

    def backward(self, gradients: Any, env: int | None = None) -> None:
        """Backward passes of the last :meth:`forward`.

        Gradients of several passes add up until :meth:`update`.

        Args:
            gradients: Gradients of the loss with respect to the outputs, in the form of the outputs.
            env: The env; all of them without it.

        Raises:
            StateError: An env has no forward pass whose backward pass is due.
        """
        envs, arrays = self._given("gradients", gradients, env, (self._outputs,))
        self._loop.backward(envs, arrays)

    def update(self, env: int | None = None) -> None:
        """Clips the gradients since the last update, and takes a step of the optimiser.

        Raises:
            StateError: An env has no gradient; nothing was updated.
        """
        self._loop.update(self._chosen(env))

    def drop_gradients(self, env: int | None = None) -> None:
        """Drops gradients that wait for :meth:`update`, and kept activations."""
        self._loop.drop_gradients(self._chosen(env))

    def step(
        self,
        scores: Sequence[float | None] | None = None,
        without: "Sequence[Mapping[str, float]] | None" = None,
    ) -> list[Env]:
        """Ends a step of growth, and returns the envs before their actions.

        It measures the gradients of the updates in the step, and restores envs whose weights are no
        longer finite from their snapshots. If actions are due, all envs WAIT first.

        Args:
            scores: A score of each env that the program measured, as a share: 1 for the best. An env
                with ``None`` has none.
            without: For each env, scores without the module in a slot, by the slot's name, see
                :meth:`eval`. The difference is the module's contribution, which FOSSILIZE needs.

        Raises:
            StateError: A gradient waits for :meth:`update`.
            DivergedError: An env failed too often.
        """
        if scores is None:
            if without is not None:
                raise refused("without", without, "nothing without `scores`")
            given: list[tuple[float | None, list[tuple[int, float]]]] = []
        else:
            each = "a number, or None, for each env"
            numbers = [None if s is None else real("scores", s) for s in self._each("scores", scores, each)]
            each = "a mapping of slots to scores for each env"
            removed = [{}] * len(self) if without is None else self._each("without", without, each)
            given = [(score, self._removed(slots)) for score, slots in zip(numbers, removed, strict=True)]
        self._loop.step(given)
        return self.envs

    def apply(self, actions: Sequence[Action]) -> "npt.NDArray[np.float32]":
        """Executes an action for each env, in order, and opens the next step. Returns the rewards.

        Raises:
            ControllerError: A value is not an action, or an action is illegal; the error has the
                rule. Nothing was executed.
            StateError: No actions are due.
        """
        given = sequence("actions", actions, "an action for each env", ControllerError)
        if not self._loop.decides():
            raise StateError("no actions are due", remedy="call `step` first")
        return np.array(self._loop.act([to_engine(action) for action in given]), np.float32)

    def widen(self, env: int, layer: str, by: int) -> None:
        """Gives a layer of an env further features, apart from actions.

        The network computes the same function, and a forward pass whose backward pass is due is dropped.
        The setting ``width_init`` chooses the initial parameters of the new features.

        Args:
            env: The env.
            layer: Name of a layer, one of ``envs[env].layers``.
            by: Number of further features.

        Raises:
            StateError: The layer cannot become wider, a gradient waits for :meth:`update`, or weights are
                not finite.
        """
        if not isinstance(layer, str):
            raise refused("layer", layer, "the name of a layer")
        self._loop.widen(self._env(env), layer, integer("by", by, 1, FEATURES_MAX))

    @property
    def envs(self) -> list[Env]:
        """The current envs, as a controller sees them, without losses."""
        return [env_of(env) for env in self._loop.envs()]

    @property
    def slots(self) -> list[str]:
        """Names of the slots, in the order of the slot head."""
        return self._loop.names()[0]

    @property
    def blueprints(self) -> list[str]:
        """Names of the blueprints, in the order of the blueprint head."""
        return self._loop.names()[1]

    @property
    def head_sizes(self) -> list[int]:
        """Number of choices of each head of an action, as :attr:`Fleet.head_sizes`."""
        return self._loop.names()[2]

    @property
    def parameters(self) -> list[int]:
        """Trained parameters of each env, modules included."""
        return [host + grown for host, grown, _ in self._loop.counts()]

    @property
    def rollbacks(self) -> list[int]:
        """Number of times that each env was restored from its snapshot."""
        return [rollbacks for *_, rollbacks in self._loop.counts()]

    def weights(self, env: int) -> Weights:
        """A copy of an env's weights, as numpy arrays; their ``save`` writes a weights file."""
        return parse(self._loop.weights(self._env(env)))

    def snapshot(self) -> list[Weights]:
        """Copies of the weights of all envs."""
        return [self.weights(env) for env in range(len(self))]

    def load(self, weights: "Weights | str | PathLike[str]", env: int | None = None) -> None:
        """Sets the weights of an env, or of all, to those of an env with the same modules.

        The state of the optimiser stays as it is. The setting ``init`` starts envs from the weights
        and the modules of a file.

        Raises:
            WeightsError: A list of all tensors that do not fit an env. This env and those after it
                keep their weights; without ``env``, those before it have the new ones.
        """
        name, found = "of the program", weights
        if not isinstance(found, Weights):
            name, found = path("weights", found, WeightsError), files.load(found)
        contents = found.contents
        for chosen in self._chosen(env):
            self._loop.load(chosen, name, contents)

    def checkpoint(self, file: "str | PathLike[str]") -> None:
        """Writes the state of all envs to a file, from which :meth:`resume` continues.

        A file that is there is replaced.

        Raises:
            StateError: A gradient waits for :meth:`update`.
            RunFolderError: The file cannot be written.
        """
        self._loop.checkpoint(path("file", file))

    def _chosen(self, env: int | None) -> list[int]:
        return list(range(len(self))) if env is None else [self._env(env)]

    def _env(self, env: object) -> int:
        return integer("env", env, 0, len(self) - 1)

    def _slot(self, argument: str, name: object) -> int:
        slots = self.slots
        if not isinstance(name, str) or name not in slots:
            raise refused(argument, name, f"one of the slots {', '.join(slots) or '(there are none)'}")
        return slots.index(name)

    def _removed(self, slots: object) -> list[tuple[int, float]]:
        if not isinstance(slots, Mapping):
            raise refused("without", slots, "a mapping of slots to scores for each env")
        return [(self._slot("without", name), real("without", score)) for name, score in slots.items()]

    def _each(self, argument: str, values: object, expected: str) -> list[Any]:
        given = sequence(argument, values, expected)
        if len(given) != len(self):
            raise refused(argument, values, f"{expected}: {len(self)} of them, got {len(given)}")
        return given

    def _given(
        self, name: str, value: Any, env: int | None, sample: tuple[int, ...]
    ) -> tuple[list[int], "list[npt.NDArray[np.float32]]"]:
        """Numbers of the chosen envs, and their arrays [batch, *sample] as the engine reads them."""
        envs = self._chosen(env)
        if env is not None:
            arrays = [floats(name, value)]
        elif isinstance(value, list | tuple):
            arrays = [floats(f"{name}[{at}]", item) for at, item in enumerate(value)]
        else:
            arrays = list(floats(name, value, 1))
        shape = ", ".join(map(str, ("batch", *sample)))
        if len(arrays) != len(envs):
            expected = f"an array for each of {len(envs)} envs, or one of shape [envs, {shape}]"
            raise wrong(name, f"{len(arrays)}", expected)
        for array in arrays:
            if array.shape[1:] != sample or array.ndim != len(sample) + 1 or not len(array):
                raise wrong(name, f"shape {list(array.shape)} for an env", f"[{shape}]")
        if len(sample) == 3:
            arrays = [array.transpose(CHANNELS_LAST) for array in arrays]
        return envs, [np.require(array, np.float32, ["C", "W", "A"]) for array in arrays]

    @staticmethod
    def _shaped(outputs: list[_meristem.Array], inputs: Any, env: int | None) -> Any:
        """Outputs in the form of the inputs."""
        arrays = [np.from_dlpack(output) for output in outputs]
        if env is not None:
            return np.array(arrays[0])
        return [np.array(a) for a in arrays] if isinstance(inputs, list | tuple) else np.stack(arrays)


def floats(name: str, value: Any, axes: int = 0) -> "npt.NDArray[Any]":
    """An array of numbers of any library, with more than ``axes`` axes."""
    try:
        array = numpy_of(name, value)
    except MeristemError as error:
        raise ArgumentError(error.message, error.causes, error.remedy, 2) from error
    if array.dtype.kind not in "biuf" or array.ndim <= axes:
        raise wrong(name, described(value, array), "an array of numbers")
    return array


def wrong(name: str, got: str, expected: str) -> ArgumentError:
    """The error for an array."""
    remedy = "convert it to an array with a row for each sample"
    return ArgumentError(f"`{name}`: got {got}, expected {expected}", (), remedy, 2)
