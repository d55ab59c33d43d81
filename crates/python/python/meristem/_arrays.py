"""Arrays in memory as a file that every run can read, in the user's folder for caches."""

import os
import secrets
import time
import zipfile
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from . import _meristem
from ._arguments import refused, sequence, text
from ._tables import columns_of, rows_of, samples_of, wrong
from ._targets import ARRAYS, targets_of
from .errors import DataError

Named = dict[str, "np.ndarray[Any, Any]"]
KINDS = ("vector", "signal", "image")
#: Most channels of an image whose channels are last.
CHANNELS_LAST_MAX = 4
#: Most characters of the name of a class.
NAME_MAX = 10_000
#: Age in seconds of a file that a process has left behind half written.
LEFT_BEHIND = 86_400


def file_of(
    train: tuple[object, object],
    test: object,
    classes: Iterable[str] | None,
    kind: str | None,
    channels_last: bool | None,
    task: str | None,
) -> tuple[Path, bool]:
    """Writes samples and targets to a file whose name is a digest of its contents.

    Equal arrays have one file. So another process can resume a run with the same arrays, or with the
    file alone. Returns the file, and whether it is new.
    """
    if kind is not None and text("kind", kind, DataError) not in KINDS:
        raise refused("kind", kind, "vector, signal or image", DataError)
    splits = {"train": train}
    if test is not None:
        if not isinstance(test, tuple | list) or len(test) != 2:
            raise refused("test", test, "a pair of samples and labels", DataError)
        splits["test"] = (test[0], test[1])
    # The training targets decide the task of both splits.
    found = {"train": targets_of("labels of train", train[1], task)}
    if "test" in splits:
        found["test"] = targets_of("labels of test", splits["test"][1], found["train"].task)
    labels = {split: targets.array for split, targets in found.items()}
    if found["train"].task == "classify":
        labels, names = numbered(labels, classes)
    else:
        if found["train"].names != found.get("test", found["train"]).names:
            got, expected = "other columns than in training", "the columns of training"
            raise wrong("labels of test", got, expected, "give both tables the same columns")
        names = names_of(classes) or found["train"].names
        check_names(names or [])
    array_of_targets = ARRAYS[found["train"].task]
    arrays: Named = {}
    order: list[str] | None = None
    for split, (samples, _) in splits.items():
        name = f"samples of {split}"
        table = columns_of(name, samples)
        if split == "test" and (table is None) != (order is None):
            raise wrong(name, "a table beside an array", "both of one kind", "convert one of them")
        if table is None:
            array = samples_of(name, samples)
        else:
            array = rows_of(name, table, order)
            order = list(table)
        base, array = placed(name, array, kind, channels_last)
        arrays |= {f"{split}_{base}": array, f"{split}_{array_of_targets}": labels[split]}
    if names is not None:
        arrays["classes"] = np.array(names, dtype=np.str_)
    return stored(arrays)


def names_of(classes: Iterable[str] | None) -> list[str] | None:
    """The given names, if there are any."""
    if classes is None:
        return None
    given = sequence("classes", classes, "a list of names", DataError)
    if not given or not all(isinstance(name, str) for name in given):
        raise refused("classes", classes, "a list of names", DataError)
    return [str.__str__(name) for name in given]


def numbered(labels: Named, classes: Iterable[str] | None) -> tuple[Named, list[str] | None]:
    """Labels as numbers, and the names of the classes. Without names, text labels are the names, sorted."""
    names = names_of(classes)
    texts = {split for split, array in labels.items() if array.dtype.kind == "U"}
    others = {split for split, array in labels.items() if array.dtype.kind != "U" and array.size}
    if texts and others:
        got = f"text in {' and '.join(sorted(texts))} alone"
        raise wrong("labels", got, "labels of one type", "convert the labels of one split")
    if texts and names is None:
        names = sorted(set(labels["train"].tolist()))
    check_names(names or [])
    if not texts or names is None:
        return labels, names
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


def check_names(names: list[str]) -> None:
    """Refuses names that a file cannot have."""
    for name in names:
        is_text = not any(0xD800 <= ord(letter) < 0xE000 for letter in name)
        if not is_text or name.endswith("\0") or len(name) > NAME_MAX:
            expected = f"Unicode text of at most {NAME_MAX} characters without a zero at its end"
            raise wrong("classes", repr(name[:40]), expected, "rename the class")


def placed(
    name: str, array: "np.ndarray[Any, Any]", kind: str | None, channels_last: bool | None
) -> tuple[str, "np.ndarray[Any, Any]"]:
    """Name of an array in the file, which determines the order of axes, and the array."""
    got, natural = f"{array.dtype} {list(array.shape)}", KINDS[array.ndim - 2]
    if channels_last and array.ndim != 4:
        raise wrong(name, got, "images [N, H, W, C]", "leave `channels_last` out")
    if array.ndim == 3:
        if kind is None:
            remedy = 'give kind="signal" for [N, C, L], or kind="image" for grey images [N, H, W]'
            raise wrong(name, got, "a kind for three axes", remedy)
        natural = "image" if kind == "image" else natural
    if kind not in (None, natural):
        raise wrong(name, got, f"samples of kind {kind}", "reshape the samples")
    if array.ndim == 4:
        last = array.shape[3] <= CHANNELS_LAST_MAX
        if channels_last and not last:
            remedy = "give x.transpose(0, 3, 1, 2) without `channels_last`"
            raise wrong(name, got, f"at most {CHANNELS_LAST_MAX} channels as the last axis", remedy)
        if channels_last is None and last and array.shape[1] > CHANNELS_LAST_MAX:
            remedy = "give channels_last=True for [N, H, W, C], or channels_last=False for [N, C, H, W]"
            raise wrong(name, got, "the order of the axes", remedy)
    is_last = bool(channels_last) or (array.ndim == 3 and kind == "image")
    return "images" if is_last else "inputs", array


def stored(arrays: Named) -> tuple[Path, bool]:
    """The file of these arrays, and whether this call wrote it. An existing file is not written again."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    digest = blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(memoryview(array.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
    cache = _meristem.user_cache()
    if cache is None:
        remedy = "set MERISTEM_CACHE to a folder"
        raise DataError("there is no folder for caches, where arrays are kept", (), remedy, 1)
    path = Path(cache) / "arrays" / f"{digest.hexdigest()}.npz"
    try:
        if is_whole(path):
            return path, False
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob("*.part"):
            if time.time() - left.stat().st_mtime > LEFT_BEHIND:
                left.unlink(missing_ok=True)
        part = path.with_suffix(f".{secrets.token_hex(8)}.part")
        try:
            with open(part, "xb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        remedy = "make room, or set MERISTEM_CACHE to another folder"
        raise DataError(f"arrays in {path.parent}: {error}", (), remedy, 1) from error
    return path, True


def is_whole(path: Path) -> bool:
    """Whether a file is there, with sound checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (FileNotFoundError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError):
        return False
