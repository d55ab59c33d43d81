"""Samples and labels of other libraries as numpy arrays."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._arguments import index
from .errors import DataError

Columns = dict[str, Any]
#: Labels are below this number.
CLASSES_MAX = 65_536


def wrong(name: str, got: str, expected: str, remedy: str) -> DataError:
    """The error for samples or labels."""
    return DataError(f"`{name}`: got {got}, expected {expected}", (), remedy, 2)


def numpy_of(name: str, value: Any) -> "np.ndarray[Any, Any]":
    """An array or a column of any library as numpy's."""
    parts = value if isinstance(value, list | tuple) else [value]
    if any(np.ma.is_masked(part) for part in parts):
        raise wrong(name, "masked or missing values", "values everywhere", "fill them, or leave the rows out")
    try:
        if hasattr(value, "detach"):  # PyTorch
            value = value.detach().cpu()
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
            value = value.resolve_conj().resolve_neg().numpy()
        array = np.asarray(value)
    except Exception as error:  # of another library
        got, remedy = f"a {type(value).__name__}: {error}", "convert it to a numpy array"
        raise wrong(name, got, "an array", remedy) from error
    # JAX's bfloat16, and long doubles.
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return array.astype(np.float64) if array.dtype.char == "g" else array


def columns_of(name: str, value: Any) -> Columns | None:
    """The columns of a table of pandas, polars or Arrow, or of a mapping; ``None`` for an array."""
    kinds = {(of.__module__.partition(".")[0], of.__name__) for of in type(value).__mro__}
    if isinstance(value, Mapping):
        names, columns = list(value), list(value.values())
    elif ("pandas", "DataFrame") in kinds:
        names = list(value.columns)
        columns = [value.iloc[:, place] for place in range(len(names))]
    elif ("polars", "DataFrame") in kinds:
        names, columns = value.columns, value.get_columns()
    elif kinds & {("pyarrow", "Table"), ("pyarrow", "RecordBatch")}:
        names, columns = value.schema.names, value.columns
    else:
        return None
    texts = [str(text) for text in names]
    for text, count in Counter(texts).items():
        if count > 1:
            raise wrong(name, f"two columns {text!r}", "one", "rename one of them")
    return dict(zip(texts, columns, strict=True))


def described(value: Any, array: "np.ndarray[Any, Any]") -> str:
    """Type and shape of a given value, for errors."""
    if array.ndim == 0 and array.dtype.kind == "O":
        return f"a {type(value).__name__}"
    return f"{array.dtype} {list(array.shape)}"


def samples_of(name: str, value: Any) -> "np.ndarray[Any, Any]":
    """Samples as an array of numbers."""
    array = numpy_of(name, value)
    if array.dtype.kind in "biuf" and array.ndim == 1:
        remedy = "a sample of one number is a row of one: x.reshape(-1, 1)"
        raise wrong(name, described(value, array), "numbers [N, F]", remedy)
    if array.dtype.kind not in "biuf" or not 2 <= array.ndim <= 4:
        remedy = "convert them to an array of numbers with a row for each sample"
        expected = "numbers [N, F], [N, C, L] or [N, C, H, W]"
        raise wrong(name, described(value, array), expected, remedy)
    # Booleans become floats: a stored byte b would have the value b / 255.
    return array.astype(np.float32) if array.dtype.kind == "b" else array


def rows_of(name: str, table: Columns, order: list[str] | None) -> "np.ndarray[Any, Any]":
    """The rows of a table, with columns in this order, which is the training table's."""
    if order is not None and set(order) != set(table):
        got = f"columns that differ by {sorted(set(order) ^ set(table))}"
        raise wrong(name, got, "the columns of training", "give both tables the same columns")
    columns = {column: numpy_of(f"{name}, column {column}", table[column]) for column in order or table}
    for column, values in columns.items():
        if values.dtype.kind not in "biuf" or values.ndim != 1:
            got = f"column {column!r} of {described(table[column], values)}"
            remedy = "leave the column out, fill missing values, or convert the column to numbers"
            raise wrong(name, got, "numbers", remedy)
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        got = f"columns of {sorted(lengths)} rows"
        raise wrong(name, got, "columns of one length", "give each column a value for each sample")
    dtype = np.result_type(np.float32, *columns.values())
    return np.column_stack([values.astype(dtype) for values in columns.values()])


def labels_of(name: str, value: Any) -> "np.ndarray[Any, Any]":
    """Labels [N]: integers, or text."""
    table = columns_of(name, value)
    if table is not None:
        if len(table) != 1:
            raise wrong(name, f"columns {sorted(table)}", "one column", "choose the labels' column")
        value = next(iter(table.values()))
    if isinstance(value, list | tuple) and not any(isinstance(v, list | tuple) for v in value):
        # numpy would convert numbers beside text to text, and missing labels to NaN or text.
        array: np.ndarray[Any, Any] = np.empty(len(value), dtype=object)
        for place, label in enumerate(value):
            array[place] = label
    else:
        array = numpy_of(name, value)
    if array.shape[1:] == (1,):
        array = array.reshape(-1)
    if array.ndim != 1:
        remedy = "make one label of each row, such as with y.argmax(axis=1)"
        raise wrong(name, described(value, array), "labels [N]", remedy)
    if array.dtype.kind == "O":
        array = _of_objects(name, array)
    if array.dtype.kind == "U":
        return array
    if array.dtype.kind not in "biufO":
        got = described(value, array)
        raise wrong(name, got, "integers, or text", "convert them, such as with y.astype(str)")
    return _whole(name, array)


def _of_objects(name: str, array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Objects that are all text, as text; or all numbers of one kind, as they are."""

    def kind(label: Any) -> str:
        if isinstance(label, str):
            return "text"
        if isinstance(label, bool | np.bool_):
            return "a boolean"
        if index(label) is not None:
            return "an integer"
        return "a number" if isinstance(label, float | np.floating) else "neither"

    kinds = [kind(label) for label in array]
    place = next((p for p, k in enumerate(kinds) if k == "neither" or k != kinds[0]), None)
    if place is not None:
        label = array[place]
        beside = "" if kinds[place] == "neither" else f" beside {kinds[0]}"
        got = f"{type(label).__name__} {label!r} at {place}{beside}"
        raise wrong(name, got, "all integers, or all text", "fill or convert it, or leave the sample out")
    if kinds and kinds[0] == "text":
        # `str(label)` of a member of an enumeration of strings may be its name; this is its value.
        return np.array([str.__str__(label) for label in array])
    return array


def _whole(name: str, array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Whole numbers that can be labels, as int64."""
    # Objects may be integers of any size.
    broken = np.flatnonzero([not (0 <= n < CLASSES_MAX and n == int(n)) for n in array.tolist()])
    if broken.size:
        place = int(broken[0])
        expected = f"whole numbers from 0 to {CLASSES_MAX - 1}"
        remedy = "number the classes from 0, and leave out samples without a label"
        raise wrong(name, f"{array[place]} at {place}", expected, remedy)
    return array.astype(np.int64)
