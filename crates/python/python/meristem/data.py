"""Datasets on a device, and batches gathered from them."""

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from . import _arrays, _meristem
from ._arguments import U32_MAX, flag, index, integer, optional, path, real, refused, sequence, text
from ._meristem import Array
from .errors import DataError


#: Maximum number of envs of a gather. Each has separate memory.
ENVS_MAX = 65_536
SEED_MAX = 2**64 - 1


class Batch(NamedTuple):
    """One env's part of a batch.

    ``numpy.asarray`` and ``torch.from_dlpack`` accept the arrays without a copy. Their memory is not
    reused while the batch, or an array that shares its memory, exists.
    """

    env: int
    #: float32 (N, C, H, W), channels last; a signal has one row. Vectors are (N, F).
    inputs: Array
    #: Classes: int32 (N). Labels from 0 to 1, or standardised numbers: float32 (N, K).
    targets: Array


def _names(target: str | Sequence[str] | None) -> list[str]:
    """Names of target columns."""
    given = [target] if isinstance(target, str) else [] if target is None else target
    names = sequence("target", given, "a list of names", DataError)
    return [text("target", name, DataError) for name in names]


class Dataset:
    """A split of a dataset.

    The process caches one copy of each split. The cache drops a copy when `clear_cache` is called,
    or when the dataset has changed and is loaded again; this object keeps its copy.
    """

    def __init__(
        self,
        dataset: Any = "embedded",
        targets: Any = None,
        *,
        test: tuple[Any, Any] | None = None,
        classes: Sequence[str] | None = None,
        kind: str | None = None,
        channels_last: bool | None = None,
        task: str | None = None,
        split: str = "train",
        root: "str | PathLike[str] | None" = None,
        skip_bad: bool = False,
        resize: int | None = None,
        target: str | Sequence[str] | None = None,
        missing: str = "refuse",
        budget: int | None = None,
        device: str = "cpu",
    ) -> None:
        """Loads a split of a dataset, or takes arrays: ``Dataset(x, y, test=(x_test, y_test))``.

        Samples and labels may be arrays of numpy, PyTorch or JAX, tables of pandas, polars or Arrow,
        or lists. They are copied to a file in the folder for caches (``MERISTEM_CACHE``), whose name
        is a digest of the contents; `settings` has its path. So ``train(dataset=data)`` can be
        resumed as long as that file exists.

        Args:
            dataset: ``embedded``, ``fashion-mnist``, ``cifar10``, ``cifar100``, ``folder``,
                ``csv``, ``arrays``, ``table``, ``mnist1d``, ``blobs``, ``spirals`` or ``friedman``,
                as for ``--dataset`` on the command line; or training samples: [N, F], [N, C, L] with
                ``kind="signal"``, [N, C, H, W], or a table with a row for each sample. A byte b
                has the value b / 255.
            targets: Targets of the training samples. Classes [N]: integers from 0 on, or text, whose
                classes are sorted. Several labels [N, K]: bits. Numbers [N] or [N, K]: floats. A
                table with a column for each label or number is accepted, too.
            test: Samples and targets of the test split.
            classes: Names of the classes, by number; or of the K labels or numbers.
            kind: ``vector``, ``signal`` or ``image``. Arrays of three axes need it: signals, or grey
                images [N, H, W].
            channels_last: Whether images are [N, H, W, C]. Required if only the last axis is short enough
                for channels.
            task: ``classify``, ``multilabel`` or ``regress``; by default the targets decide. Floats that
                are all whole numbers, and a target column of whole numbers of a ``table``, are
                classes, unless the task is ``regress``.
            split: ``train`` or ``test``.
            root: The folder or file of the dataset, as for ``--data-root`` on the command line.
            skip_bad: Whether to leave out images that do not decode.
            resize: Rows and columns of all images, for ``folder`` and ``csv``: images of other sizes
                are cut to their central square and scaled.
            target: Names of the target columns, for ``table``.
            missing: ``refuse`` or ``fill``: missing values of features, for ``table``.
            budget: Maximum size of a resident copy in bytes; a larger dataset is streamed.
            device: ``cpu``, ``cpu:1``, …

        Raises:
            DataError: Files are missing or damaged, the split does not exist, or an argument is
                invalid.
        """
        place: dict[str, Any] = {
            "root": None if root is None else path("root", root, DataError),
            "skip_bad": flag("skip_bad", skip_bad, DataError),
            "resize": optional("resize", resize, 1, U32_MAX, DataError),
            "target": _names(target),
            "missing": text("missing", missing, DataError),
            "numbers": False,
            "budget": optional("budget", budget, error=DataError),
            "device": text("device", device, DataError),
        }
        of_arrays = {"targets": targets, "test": test, "classes": classes, "kind": kind}
        of_arrays |= {"channels_last": channels_last, "task": task}
        new_file: Path | None = None
        if not isinstance(dataset, str):
            if targets is None:
                expected = "the name of a dataset, or samples with `targets`"
                raise refused("dataset", dataset, expected, DataError)
            for name in ("root", "resize"):
                if place[name] is not None:
                    raise refused(name, place[name], "None for arrays", DataError)
            layout = None if channels_last is None else flag("channels_last", channels_last, DataError)
            file, is_new = _arrays.file_of((dataset, targets), test, classes, kind, layout, task)
            dataset, place["root"], new_file = "arrays", str(file), file if is_new else None
        else:
            if dataset == "table" and task in ("classify", "regress"):
                place["numbers"], of_arrays["task"] = task == "regress", None
            for name, value in of_arrays.items():
                if value is not None:
                    raise refused(name, value, f"None for the dataset {dataset!r}", DataError)
        names = text("dataset", dataset, DataError), text("split", split, DataError)
        try:
            self._resident = _meristem.Resident(*names, place)
        except DataError:
            if new_file is not None:
                new_file.unlink(missing_ok=True)
            raise
        wanted = {"data_root": place["root"], "resize": place["resize"]}
        wanted["skip_bad"] = place["skip_bad"] or None
        wanted["target"] = place["target"] or None
        wanted["missing"] = None if missing == "refuse" else missing
        wanted["task"] = "regress" if place["numbers"] else None
        # The engine reads this attribute.
        self._dataset_settings = {"dataset": dataset}
        self._dataset_settings |= {key: value for key, value in wanted.items() if value is not None}
        about = self._resident.info()
        self.name: str = about["name"]
        #: ``image``, ``signal`` or ``vector``.
        self.kind: str = about["kind"]
        #: Channels, height, width of an image; channels, points of a signal; features of a vector.
        self.shape: tuple[int, ...] = tuple(about["shape"])
        #: Kind of the targets, not their values: ``classes``, ``labels`` or ``numbers``.
        self.targets: str = about["targets"]
        #: Names of the classes, labels or numbers.
        self.classes: list[str] = about["classes"]
        #: Mean and standard deviation of each of the training targets that are numbers, else empty.
        self.target_mean: list[float] = about["target_mean"]
        self.target_std: list[float] = about["target_std"]
        #: Mean and standard deviation of each channel of the training samples, bytes as 0..1.
        self.mean: list[float] = about["mean"]
        self.std: list[float] = about["std"]
        self.device: str = about["device"]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a run on this dataset; ``train(dataset=data)`` takes them."""
        return dict(self._dataset_settings)

    def __len__(self) -> int:
        return len(self._resident)

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self)} {self.kind}s of {self.shape})"


class GatherBatches:
    """Batches for one or more envs, gathered from one copy of a dataset.

    The same seed gives the same batches in every process. A batch is indexed, augmented and
    normalised in one pass, while the caller uses the previous batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: int = 128,
        *,
        envs: int = 1,
        epoch: str = "full",
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        subset: Sequence[int] | None = None,
        parts: Sequence[Sequence[int]] | None = None,
        crop: int = 0,
        flip: bool = False,
        cutout: int = 0,
        max_batches: int | None = None,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        """Prepares to gather.

        Args:
            dataset: The dataset, which this object keeps alive.
            batch: Number of images per env in a batch.
            envs: Number of envs. Each has separate memory and, with epoch ``full``, a separate order.
            epoch: ``full``: each env gets every image; ``dealt``: the images are divided among
                the envs.
            shuffle: Whether the order changes with each epoch.
            drop_last: Whether to leave out a last batch that is not full.
            seed: Seed of order and augmentation.
            subset: Indices of the images to use; all by default.
            parts: Indices of the images of each env, instead of ``subset``; an index may occur several
                times. Envs with fewer images have fewer batches. With epoch ``dealt`` envs with equal
                lists divide them.
            crop: Pixels of padding before a random crop; 0 for none.
            flip: Whether to flip left and right with probability 1/2.
            cutout: Side of a square that is cut out, in pixels; 0 for none.
            max_batches: Maximum number of batches in an epoch.
            normalize: Mean and standard deviation per channel; the dataset's own by default.

        Raises:
            DataError: An argument is invalid; the error names it.
        """
        if not isinstance(dataset, Dataset):
            raise refused("dataset", dataset, "a meristem.Dataset", DataError)
        options = {
            "batch": integer("batch", batch, 1, U32_MAX, DataError),
            "envs": integer("envs", envs, 1, ENVS_MAX, DataError),
            "epoch": text("epoch", epoch, DataError),
            "shuffle": flag("shuffle", shuffle, DataError),
            "drop_last": flag("drop_last", drop_last, DataError),
            "seed": integer("seed", seed, 0, SEED_MAX, DataError),
            "subset": None if subset is None else _indices("subset", subset),
            "parts": None if parts is None else _parts(parts, subset),
            "crop": integer("crop", crop, 0, U32_MAX, DataError),
            "flip": flag("flip", flip, DataError),
            "cutout": integer("cutout", cutout, 0, U32_MAX, DataError),
            "max_batches": optional("max_batches", max_batches, 1, error=DataError),
            "normalize": None if normalize is None else _constants(normalize),
        }
        self._gather = _meristem.Gather(dataset._resident, options)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._gather)

    def epoch(self, number: int = 0) -> Iterator[list[Batch]]:
        """The batches of an epoch. Each list has a batch for every env with images left.

        Epochs may be requested in any order. Starting an epoch ends the previous one.

        Raises:
            DataError: ``number`` is not an integer, or is negative.
            StateError: Another epoch was started, or another thread uses this object.
        """
        return self._batches(integer("number", number, error=DataError))

    def _batches(self, number: int) -> Iterator[list[Batch]]:
        begun = self._gather.start(number)
        while (parts := self._gather.next(begun)) is not None:
            yield [Batch(*part) for part in parts]

    @property
    def added_buffers(self) -> int:
        """Number of buffers that were added because the caller held all batches of an env."""
        return self._gather.added_buffers()


def _indices(argument: str, subset: object) -> list[int]:
    expected = "indices of images, such as `numpy.flatnonzero(mask)`"
    numbers = []
    for item in sequence(argument, subset, expected, DataError):
        number = index(item)
        if number is None or not 0 <= number <= U32_MAX:
            raise refused(argument, item, expected, DataError)
        numbers.append(number)
    return numbers


def _parts(parts: object, subset: object) -> list[list[int]]:
    if subset is not None:
        raise refused("parts", parts, "None with `subset`", DataError)
    expected = "a list of indices of images for each env"
    return [_indices("parts", part) for part in sequence("parts", parts, expected, DataError)]


def _constants(normalize: object) -> tuple[list[float], list[float]]:
    expected = "a mean and a standard deviation for each channel, such as ([0.5], [0.25])"
    pair = [
        [
            real("normalize", number, DataError)
            for number in sequence("normalize", part, expected, DataError)
        ]
        for part in sequence("normalize", normalize, expected, DataError)
    ]
    if len(pair) != 2:
        raise refused("normalize", normalize, expected, DataError)
    mean, std = pair
    return mean, std


def clear_cache() -> int:
    """Clears the cache of datasets. A copy in use is freed when its last user is.

    Returns the number of removed copies.
    """
    return _meristem.clear_cache()
