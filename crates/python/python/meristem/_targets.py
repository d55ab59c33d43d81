"""Targets of samples as arrays: classes, several labels, or numbers."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._arguments import refused, text
from ._tables import columns_of, described, labels_of, numpy_of, wrong
from .errors import DataError

#: Tasks with the arrays of their targets in a file.
ARRAYS = {"classify": "labels", "multilabel": "labels", "regress": "targets"}


#: Largest number of different whole numbers for which targets of floats count as classes.
CLASSES_MAX = 100


@dataclass(frozen=True)
class Targets:
    """Targets of a split."""

    task: str
    #: Classes [N], labels [N, K] or numbers [N] or [N, K].
    array: "np.ndarray[Any, Any]"
    #: Names of the labels or numbers, if they came as the columns of a table.
    names: list[str] | None = None


def targets_of(name: str, value: Any, task: str | None) -> Targets:
    """Targets of the task, or by default of the task that their values suggest.

    With one axis, integers, text, and floats that are all whole are classes [N]; other floats are
    numbers. With two axes, bits are labels, and other floats are numbers.
    """
    if task is not None and text("task", task, DataError) not in ARRAYS:
        raise refused("task", task, "classify, multilabel or regress", DataError)
    table = columns_of(name, value)
    if table is not None and len(table) != 1:
        columns = [numpy_of(f"{name}, column {column}", table[column]) for column in table]
        if not columns or any(column.ndim != 1 or len(column) != len(columns[0]) for column in columns):
            raise wrong(name, "columns of other lengths", "columns of one length", "fill the columns")
        found = _of_array(name, np.column_stack(columns), task)
        return Targets(found.task, found.array, list(table))
    plain = value if table is None else next(iter(table.values()))
    if task != "classify" and _may_be_numbers(plain):
        array = numpy_of(name, plain)
        if array.dtype.kind in "biuf" and (
            array.ndim == 2 or _are_numbers(name, array, task)
        ):
            return _of_array(name, array, task)
    if task in ("multilabel", "regress"):
        expected = "bits [N, K]" if task == "multilabel" else "numbers [N] or [N, K]"
        array = numpy_of(name, plain)
        raise wrong(name, described(plain, array), expected, "convert them, or leave `task` out")
    return Targets("classify", labels_of(name, value))


def _may_be_numbers(value: Any) -> bool:
    """Whether numpy makes an array of numbers of a value, without converting text or objects."""
    parts = value if isinstance(value, list | tuple) else [value]
    return not any(part is None or isinstance(part, str) for part in parts)


def _are_numbers(name: str, array: "np.ndarray[Any, Any]", task: str | None) -> bool:
    """Whether targets of one axis are numbers.

    Raises:
        DataError: Floats that are all whole numbers, but too many or too large for classes.
    """
    if task is not None or array.dtype.kind != "f" or array.ndim != 1:
        return task == "regress"
    finite = array[np.isfinite(array)]
    if (finite != np.floor(finite)).any():
        return True
    values = np.unique(finite)
    if len(values) > CLASSES_MAX or (finite < 0).any():
        got = f"floats that are {len(values)} whole numbers from {values[0]:g} to {values[-1]:g}"
        remedy = 'give task="regress" for numbers, or task="classify" for classes'
        raise wrong(name, got, "a task", remedy)
    return False


def _of_array(name: str, array: "np.ndarray[Any, Any]", task: str | None) -> Targets:
    """Labels [N, K] or numbers."""
    if array.ndim == 2 and array.shape[1] == 1 and task is None:
        return targets_of(name, array[:, 0], task)
    if task is None:
        # A NaN does not count as a bit.
        bits = bool(((array == 0) | (array == 1)).all())
        task = "multilabel" if bits else "regress"
        if bits and array.shape[1] > 1 and (array.sum(axis=1) == 1).all():
            problem = f"{name}: every sample has exactly one label; for one class each, give y.argmax(axis=1)"
            warnings.warn(problem, UserWarning, stacklevel=5)
        if not bits and array.dtype.kind != "f":
            got = described(array, array)
            remedy = 'give task="regress" for numbers; for one class each, y.argmax(axis=1)'
            raise wrong(name, got, "labels [N], bits [N, K], or floats", remedy)
    if task == "classify" or (task == "multilabel" and array.ndim != 2):
        expected = "labels [N]" if task == "classify" else "bits [N, K]"
        remedy = "make one label of each row, such as with y.argmax(axis=1)"
        raise wrong(name, described(array, array), expected, remedy)
    if array.ndim not in (1, 2):
        raise wrong(name, described(array, array), "numbers [N] or [N, K]", "reshape the targets")
    if task == "multilabel":
        beyond = np.argwhere(~((array >= 0) & (array <= 1)))
        if beyond.size:
            row, column = (int(place) for place in beyond[0])
            got = f"{array[row, column]} at sample {row}, column {column}"
            raise wrong(name, got, "labels from 0 to 1", 'give task="regress" for numbers')
    return Targets(task, array.astype(np.uint8) if array.dtype.kind == "b" else array)
