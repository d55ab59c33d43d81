"""Datasets on a device, and batches gathered from them."""

from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from typing import NamedTuple

from . import _meristem
from ._meristem import Array


class Batch(NamedTuple):
    """One env's part of a batch.

    ``numpy.from_dlpack`` and ``torch.from_dlpack`` take the arrays without a copy. Their memory is
    not reused while the batch, or anything that was made of it, exists.
    """

    env: int
    #: float32 (N, C, H, W), channels last.
    inputs: Array
    #: int32 (N).
    targets: Array


class Dataset:
    """A split of a dataset.

    The process has one copy of it, which stays until `clear_cache`, or until a file of the dataset has changed and is
    asked for again. This object keeps the copy that it has.
    """

    def __init__(
        self,
        dataset: str = "embedded",
        *,
        split: str = "train",
        root: "str | PathLike[str] | None" = None,
        skip_bad: bool = False,
        resize: int | None = None,
        budget: int | None = None,
        device: str = "cpu",
    ) -> None:
        """Loads a split.

        Args:
            dataset: ``embedded``, ``fashion-mnist``, ``cifar10``, ``cifar100``, ``folder``,
                ``csv`` or ``arrays``, as ``--dataset`` of the command line.
            split: ``train`` or ``test``.
            root: The folder or file of the dataset.
            skip_bad: Whether to leave out images that do not decode.
            resize: Rows and columns to which images of ``folder`` and ``csv`` are scaled, after a cut to their
                central square.
            budget: Bytes that a resident copy may take; a larger dataset is streamed.
            device: ``cpu``, ``cpu:1``, …

        Raises:
            DataError: Missing or damaged files, or no such split.
        """
        place = {
            "root": None if root is None else fspath(root),
            "skip_bad": skip_bad,
            "resize": resize,
            "budget": budget,
            "device": device,
        }
        self._resident = _meristem.Resident(dataset, split, place)
        about = self._resident.info()
        self.name: str = about["name"]
        #: Channels, height, width.
        self.shape: tuple[int, int, int] = about["shape"]
        self.classes: list[str] = about["classes"]
        #: Mean and standard deviation of each channel of the training images, in [0, 1] units.
        self.mean: list[float] = about["mean"]
        self.std: list[float] = about["std"]
        self.device: str = about["device"]

    def __len__(self) -> int:
        return len(self._resident)

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self)} images of {self.shape})"


class GatherBatches:
    """Batches for some envs, gathered from one copy of a dataset.

    The same seed gives the same batches, in every process. A batch is indexed, augmented and
    normalised in one pass, while the caller works with the one before it.
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
        crop: int = 0,
        flip: bool = False,
        cutout: int = 0,
        max_batches: int | None = None,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        """Prepares to gather.

        Args:
            dataset: The dataset, which stays alive.
            batch: Images of each env in a batch.
            envs: Number of envs, each with memory and, with epoch ``full``, an order of its own.
            epoch: ``full``: each env gets every image; ``dealt``: the images are divided among
                the envs.
            shuffle: Whether each epoch has an order of its own.
            drop_last: Whether to leave out a last batch that is not full.
            seed: Seed of order and augmentation.
            subset: Indices of the images to serve; all by default.
            crop: Pixels of padding before a random crop; 0 for none.
            flip: Whether to flip left and right with probability 1/2.
            cutout: Side of a square that is cut out, in pixels; 0 for none.
            max_batches: Most batches in an epoch.
            normalize: Mean and standard deviation per channel; the dataset's own by default.

        Raises:
            DataError: Names the argument that does not fit.
        """
        options = {
            "batch": batch,
            "envs": envs,
            "epoch": epoch,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "seed": seed,
            "subset": subset,
            "crop": crop,
            "flip": flip,
            "cutout": cutout,
            "max_batches": max_batches,
            "normalize": normalize,
        }
        self._gather = _meristem.Gather(dataset._resident, options)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._gather)

    def epoch(self, number: int = 0) -> Iterator[list[Batch]]:
        """The batches of an epoch: of each env that has images left, in order of the envs.

        Any epoch can be asked for, at any time; starting one ends the one before.

        Raises:
            StateError: Another epoch was started, or another thread uses this object.
        """
        begun = self._gather.start(number)
        while (parts := self._gather.next(begun)) is not None:
            yield [Batch(*part) for part in parts]

    @property
    def added_buffers(self) -> int:
        """Buffers that were added because the caller held all batches of an env."""
        return self._gather.added_buffers()


def clear_cache() -> int:
    """Forgets all copies of datasets; their memory is freed when their last user is gone."""
    return _meristem.clear_cache()
