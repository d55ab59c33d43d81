"""Arrays in memory as a file that every run can read, in the user's folder for caches."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from . import _meristem
from ._arguments import refused
from .errors import DataError

Named = dict[str, "np.ndarray[Any, Any]"]
KINDS = ("vector", "signal", "image")
#: Most channels of an image whose channels are last.
CHANNELS_LAST_MAX = 4


def file_of(
    train: tuple[object, object],
    test: object,
    classes: Sequence[str] | None,
    kind: str | None,
    channels_last: bool,
) -> Path:
    """Writes samples and labels to a file whose name is a digest of its contents.

    Equal arrays have one file, so that a run can be resumed by another process that makes the same
    arrays, or none.
    """
    if train[1] is None:
        raise refused("targets", None, "the labels of the samples", DataError)
    if kind is not None and kind not in KINDS:
        raise refused("kind", kind, "vector, signal or image", DataError)
    splits = {"train": train}
    if test is not None:
        if not isinstance(test, tuple | list) or len(test) != 2:
            raise refused("test", test, "a pair of samples and labels", DataError)
        splits["test"] = (test[0], test[1])
    labels = {split: labels_of(f"labels of {split}", pair[1]) for split, pair in splits.items()}
    labels, names = numbered(labels, classes)
    arrays: Named = {}
    order: list[str] | None = None
    for split, (samples, _) in splits.items():
        name, table = f"samples of {split}", columns_of(samples)
        if table is None:
            array = samples_of(name, samples)
        else:
            array = rows_of(name, table, order)
            order = list(table)
        base, array = placed(name, array, kind, channels_last)
        arrays |= {f"{split}_{base}": array, f"{split}_labels": labels[split]}
    if names is not None:
        arrays["classes"] = np.array(names, dtype=np.str_)
    return stored(arrays)


def wrong(name: str, got: str, expected: str, remedy: str) -> DataError:
    return DataError(f"`{name}`: got {got}, expected {expected}", (), remedy, 2)


def numpy_of(value: Any) -> "np.ndarray[Any, Any]":
    """An array or a column of any library as numpy's."""
    if hasattr(value, "detach"):  # PyTorch
        value = value.detach().cpu()
        return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)
    if np.ma.is_masked(value):
        raise wrong("samples or labels", "a masked array", "no masked values", "fill them")
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.array(None)
    # bfloat16 of JAX.
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def columns_of(value: Any) -> dict[str, Any] | None:
    """The columns of a table of pandas, polars or Arrow, or of a mapping; ``None`` for an array."""
    if isinstance(value, Mapping):
        return {str(name): column for name, column in value.items()}
    if hasattr(value, "column_names"):
        names, columns = value.column_names, value.columns
    elif hasattr(value, "columns") and hasattr(value, "iloc"):
        names = list(value.columns)
        columns = [value.iloc[:, place] for place in range(len(names))]
    elif hasattr(value, "columns") and hasattr(value, "get_columns"):
        names, columns = value.columns, value.get_columns()
    else:
        return None
    texts = [str(name) for name in names]
    for name in texts:
        if texts.count(name) > 1:
            raise wrong("samples", f"two columns {name!r}", "one", "rename one of them")
    return dict(zip(texts, columns, strict=True))


def samples_of(name: str, value: Any) -> "np.ndarray[Any, Any]":
    """Samples as an array of numbers."""
    array = numpy_of(value)
    if array.dtype.kind not in "biuf" or array.ndim < 2:
        got = f"{array.dtype} {list(array.shape)}"
        remedy = "a sample of one number is a row of one: x.reshape(-1, 1)"
        raise wrong(name, got, "numbers [N, F], [N, C, L] or [N, C, H, W]", remedy)
    # A byte has the value b / 255.
    return array.astype(np.float32) if array.dtype.kind == "b" else array


def rows_of(
    name: str, table: dict[str, Any], order: list[str] | None
) -> "np.ndarray[Any, Any]":
    """The rows of a table, with columns in this order, which is the training table's."""
    if order is not None and set(order) != set(table):
        other = sorted(set(order) ^ set(table))
        remedy = "give both tables the same columns"
        raise wrong(name, f"columns that differ by {other}", "the columns of training", remedy)
    columns = {column: numpy_of(table[column]) for column in order or table}
    for column, values in columns.items():
        if values.dtype.kind not in "biuf" or values.ndim != 1:
            got = f"column {column!r} of {values.dtype} {list(values.shape)}"
            remedy = "leave the column out, or make numbers of it, such as one column for each category"
            raise wrong(name, got, "numbers", remedy)
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        raise wrong(name, f"columns of {sorted(lengths)} rows", "columns of one length", "repair them")
    dtype = np.result_type(np.float32, *columns.values())
    return np.column_stack([values.astype(dtype) for values in columns.values()])


def labels_of(name: str, value: Any) -> "np.ndarray[Any, Any]":
    """Labels [N]: integers, or text."""
    table = columns_of(value)
    if table is not None:
        if len(table) != 1:
            raise wrong(name, f"columns {sorted(table)}", "one column", "choose the labels' column")
        [value] = table.values()
    array = numpy_of(value)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        remedy = "make one label of each row, such as with y.argmax(axis=1)"
        raise wrong(name, f"{array.dtype} {list(array.shape)}", "labels [N]", remedy)
    if array.dtype.kind == "O":
        for place, label in enumerate(array):
            if not isinstance(label, str):
                got = f"{type(label).__name__} {label!r} at {place}"
                raise wrong(name, got, "integers, or text", "fill missing labels, or leave them out")
        array = array.astype(np.str_)
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    if array.dtype.kind == "f":
        broken = np.flatnonzero(array != np.floor(array))
        if broken.size or not np.isfinite(array).all():
            place = int(broken[0]) if broken.size else int(np.flatnonzero(~np.isfinite(array))[0])
            got = f"{array[place]} at {place}"
            raise wrong(name, got, "whole numbers", "number the classes from 0")
        return array.astype(np.int64)
    if array.dtype.kind not in "iuU":
        raise wrong(name, f"{array.dtype} {list(array.shape)}", "integers, or text", "convert them")
    return array


def numbered(labels: Named, classes: Sequence[str] | None) -> tuple[Named, list[str] | None]:
    """Labels as numbers, and the names of the classes, which text labels need: sorted by default."""
    if classes is not None:
        if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
            raise refused("classes", classes, "a list of names", DataError)
        classes = list(classes)
    texts = {split for split, array in labels.items() if array.dtype.kind == "U"}
    if not texts:
        return labels, classes
    if len(texts) != len(labels):
        got = f"text in {' and '.join(sorted(texts))} alone"
        raise wrong("labels", got, "labels of one type", "convert the labels of one split")
    names = sorted(set(labels["train"].tolist())) if classes is None else classes
    places = {name: place for place, name in enumerate(names)}
    found = {}
    for split, array in labels.items():
        unknown = next((name for name in array.tolist() if name not in places), None)
        if unknown is not None:
            expected = "a class of the training samples" if classes is None else "one of `classes`"
            remedy = "leave the sample out, or name its class in `classes`"
            raise wrong(f"labels of {split}", repr(unknown), expected, remedy)
        found[split] = np.array([places[name] for name in array.tolist()], dtype=np.int64)
    return found, names


def placed(
    name: str, array: "np.ndarray[Any, Any]", kind: str | None, channels_last: bool
) -> tuple[str, "np.ndarray[Any, Any]"]:
    """The name in the file by which an array has its order of axes, and the array."""
    shape, natural = list(array.shape), {2: "vector", 3: "signal", 4: "image"}.get(array.ndim)
    if array.ndim == 3 and kind is None:
        remedy = 'give kind="signal" for [N, C, L], or kind="image" for grey images [N, H, W]'
        raise wrong(name, f"{array.dtype} {shape}", "a kind for three axes", remedy)
    if array.ndim == 4 and kind in (None, "image") and not channels_last:
        if shape[3] <= CHANNELS_LAST_MAX < shape[1]:
            remedy = "give channels_last=True, or x.transpose(0, 3, 1, 2)"
            raise wrong(name, f"{array.dtype} {shape}", "images [N, C, H, W]", remedy)
    if kind == "image" and array.ndim == 3:
        return "images", array
    if natural is None or (kind is not None and kind != natural):
        raise wrong(name, f"{array.dtype} {shape}", f"samples of kind {kind}", "reshape the samples")
    return ("images" if channels_last and array.ndim == 4 else "inputs"), array


def stored(arrays: Named) -> Path:
    """The file of these arrays, which is written unless it exists."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    digest = blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(memoryview(array.reshape(-1).view(np.uint8)))
    cache = _meristem.user_cache()
    if cache is None:
        remedy = "set MERISTEM_CACHE to a folder"
        raise DataError("there is no folder for caches, where arrays are kept", (), remedy, 1)
    path = Path(cache) / "arrays" / f"{digest.hexdigest()}.npz"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        remedy = "make room, or set MERISTEM_CACHE to another folder"
        raise DataError(f"arrays in {path.parent}: {error}", (), remedy, 1) from error
    return path
