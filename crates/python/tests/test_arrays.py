"""Datasets of arrays in memory (D13)."""

from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meristem
from meristem import errors

RNG = np.random.default_rng(3)
X = RNG.normal([5, -3, 0], [2, 0.1, 1], (60, 3)).astype(np.float32)
Y = np.arange(60) % 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MERISTEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "arrays"


def gathered(data: meristem.Dataset) -> tuple[np.ndarray[Any, Any], list[int]]:
    """All samples in order, in their own values, and their labels."""
    count = len(data.mean)
    plain = ([0.0] * count, [1.0] * count)
    [[batch]] = meristem.GatherBatches(data, len(data), shuffle=False, normalize=plain).epoch()
    return np.array(batch.inputs), np.asarray(batch.targets).tolist()


def test_arrays_are_a_dataset_with_one_file(cache: Path) -> None:
    data = meristem.Dataset(X, Y, test=(X[:6], Y[:6]))
    assert (data.kind, data.shape, data.classes, len(data)) == ("vector", (3,), ["0", "1", "2"], 60)
    samples, labels = gathered(data)
    assert np.array_equal(samples, X) and labels == Y.tolist()
    test = meristem.Dataset(X, Y, test=(X[:6], Y[:6]), split="test")
    assert len(test) == 6 and gathered(test)[1] == Y[:6].tolist()
    # Equal arrays have one file, whatever their memory looks like; others have another.
    meristem.Dataset(np.asfortranarray(X), Y, test=(X[:6], Y[:6]))
    assert [str(path) for path in cache.iterdir()] == [data.settings["data_root"]]
    meristem.Dataset(X[::-1], Y, test=(X[:6], Y[:6]))
    assert len(list(cache.iterdir())) == 2


def test_types_of_numbers_and_of_labels() -> None:
    for x in (X.astype(np.float64), X.tolist(), X.astype(np.float16).astype(np.float32)):
        np.testing.assert_allclose(gathered(meristem.Dataset(x, Y))[0], X, rtol=1e-3, atol=1e-3)
    bits, _ = gathered(meristem.Dataset(X > 0, Y))
    assert np.array_equal(bits, X > 0)
    for y in (Y.astype(np.uint8), Y.astype(np.float32), Y.tolist(), Y[:, None]):
        assert gathered(meristem.Dataset(X, y))[1] == Y.tolist()
    assert gathered(meristem.Dataset(X, Y == 1))[1] == (Y == 1).tolist()
    # Text is sorted, or has the order that is given.
    names = np.array(["oak", "elm", "μ"])[Y]
    data = meristem.Dataset(X, names, test=(X[:2], ["elm", "oak"]))
    assert data.classes == ["elm", "oak", "μ"]
    assert gathered(data)[1] == [[1, 0, 2][y] for y in Y]
    assert gathered(meristem.Dataset(X, names, test=(X[:2], ["elm", "oak"]), split="test"))[1] == [0, 1]
    given = ["μ", "oak", "elm", "fir"]
    data = meristem.Dataset(X, names.astype(object), classes=given)
    assert data.classes == given and gathered(data)[1] == [[1, 2, 0][y] for y in Y]
    assert meristem.Dataset(X, Y, classes=["a", "b", "c"]).classes == ["a", "b", "c"]


def test_axes() -> None:
    images = RNG.integers(0, 256, (6, 4, 5), dtype=np.uint8)
    y = np.arange(6) % 2
    grey = meristem.Dataset(images, y, kind="image")
    assert (grey.kind, grey.shape) == ("image", (1, 4, 5))
    assert np.allclose(gathered(grey)[0][:, 0], images / 255.0)
    signal = meristem.Dataset(images, y, kind="signal")
    assert (signal.kind, signal.shape) == ("signal", (4, 5))
    colours = RNG.integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)
    data = meristem.Dataset(colours, y, channels_last=True)
    assert data.shape == (3, 8, 9)
    assert np.allclose(gathered(data)[0], colours.transpose(0, 3, 1, 2) / 255.0)
    wide = meristem.Dataset(np.zeros((2, 6, 20, 1)), [0, 1], channels_last=False)
    assert wide.shape == (6, 20, 1)
    same = meristem.Dataset(colours.transpose(0, 3, 1, 2), y)
    assert np.array_equal(gathered(same)[0], gathered(data)[0])


def test_tables_of_other_libraries() -> None:
    columns = {"age": X[:, 0], "height": X[:, 1].astype(np.float64), "adult": X[:, 2] > 0}
    expected = np.column_stack([X[:, 0], X[:, 1], X[:, 2] > 0])
    names = np.array(["oak", "elm", "fir"])[Y].tolist()
    tables = [(columns, names)]
    for module in ("pandas", "polars", "pyarrow"):
        try:
            library = __import__(module)
        except ImportError:
            continue
        if module == "pyarrow":
            tables.append((library.table(columns), library.array(names)))
        else:
            tables.append((library.DataFrame(columns), library.Series(names)))
            tables.append((library.DataFrame(columns), library.DataFrame({"kind": names})))
    for x, y in tables:
        data = meristem.Dataset(x, y)
        samples, labels = gathered(data)
        np.testing.assert_allclose(samples, expected, rtol=1e-6)
        assert data.classes == ["elm", "fir", "oak"] and labels == [[2, 0, 1][k] for k in Y]
    # Columns of the test table are found by name.
    turned = dict(reversed(columns.items()))
    for other in (turned, {name: values[:5] for name, values in turned.items()}):
        count = len(other["age"])
        test = (other, names[:count])
        found, _ = gathered(meristem.Dataset(columns, names, test=test, split="test"))
        np.testing.assert_allclose(found, expected[:count], rtol=1e-6)
    with pytest.raises(errors.DataError, match=r"columns that differ by \['height', 'weight'\]"):
        other = {"age": X[:, 0], "weight": X[:, 1], "adult": X[:, 2] > 0}
        meristem.Dataset(columns, names, test=(other, names))
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(columns | {"city": names})
    with pytest.raises(errors.DataError, match="column 'city' of .*expected numbers"):
        meristem.Dataset(table, Y)
    table = pandas.DataFrame(np.zeros((60, 2)), columns=["a", "a"])
    with pytest.raises(errors.DataError, match="two columns 'a'"):
        meristem.Dataset(table, Y)
    column = pandas.Series(names)
    column[7] = None
    with pytest.raises(errors.DataError, match="at 7.*, expected all integers, or all text"):
        meristem.Dataset(X, column)
    table = pandas.DataFrame(columns)
    table.loc[4, "height"] = None
    with pytest.raises(errors.DataError, match="value 1 of sample 4"):
        meristem.Dataset(table, Y)


def test_tensors_of_other_libraries() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(X, requires_grad=True)
    assert np.array_equal(gathered(meristem.Dataset(x, torch.tensor(Y)))[0], X)
    rounded = torch.tensor(X).bfloat16()
    data = meristem.Dataset(rounded, torch.tensor(Y))
    assert np.array_equal(gathered(data)[0], rounded.float().numpy())


def test_what_no_dataset_can_be_is_named() -> None:
    def refused(match: str, *arguments: Any, **named: Any) -> None:
        with pytest.raises(errors.DataError, match=match):
            meristem.Dataset(*arguments, **named)

    broken = X.copy()
    broken[7, 1] = np.nan
    refused("value 1 of sample 7", broken, Y)
    refused("`dataset`: got .*, expected the name of a dataset, or samples with `targets`", X)
    refused(r"float32 \[60\], expected numbers \[N, F\]", X[:, 0], Y)
    refused("expected numbers", np.full((60, 2), "a"), Y)
    refused("got a list: .*, expected an array", [[1, 2], [3]], [0, 1])
    refused("masked or missing", np.ma.masked_less(X, 0), Y)
    refused("masked or missing", [np.ma.masked_less(row, 0) for row in X], Y)
    refused("a kind for three axes", np.zeros((4, 2, 2)), [0, 1, 0, 1])
    refused("channels_last=True", np.zeros((2, 8, 8, 3)), [0, 1])
    refused("samples of kind signal", X, Y, kind="signal")
    refused("vector, signal or image", X, Y, kind="picture")
    refused(r"1.5 at 1, expected whole numbers", X, [0.0, 1.5] * 30, task="classify")
    refused(r"nan at 2, expected whole numbers", X, [0.0, 1.0, np.nan] * 20)
    refused(r"1e\+30 at 0", X, [1e30, 1.0] * 30, task="classify")
    refused("float nan at 1 beside text", X, ["oak", float("nan")] * 30)
    refused("int 1 at 1 beside text", X, ["oak", 1] * 30)
    refused("str '1' at 1 beside an integer", X, [0, "1"] * 30)
    refused("bool True at 1 beside an integer", X, [0, True] * 30)
    refused("NoneType None at 0", X, [None, 1] * 30)
    refused("1180591620717411303424 at 0", X, [2**70, 1] * 30)
    refused("-1 at 0, expected whole numbers from 0 to 65535", X, Y - 1)
    refused(r"integers \[60\]", X, Y[:50])
    refused(r"expected labels \[N\]", X, np.eye(3)[Y], task="classify")
    refused("label 2 of `train_labels`.*below 2", X, Y, classes=["a", "b"])
    refused("name 1 of `classes`", X, Y, classes=["a", "a", "b"])
    refused("a list of names", X, Y, classes="abc")
    refused("'fir', expected one of `classes`", X, ["fir"] * 60, classes=["oak", "elm"])
    refused("'fir', expected a class of the training", X, ["oak"] * 60, test=(X[:1], ["fir"]))
    refused("text in test alone", X, Y, test=(X[:1], ["fir"]))
    refused("a pair of samples and labels", X, Y, test=X)
    refused("3 features of floats as in training", X, Y, test=(X[:, :2], Y))
    refused("a list of names", X, Y, classes={"a": 0, "b": 1, "c": 2})
    refused("a list of names", X, Y, classes={"a", "b", "c"})
    refused("a list of names", X, Y, classes=5)
    refused("a list of names", X, Y, classes=[])
    for name in ("a\0", "\ud800", "a" * 10_001):
        refused("Unicode text of at most 10000", X, Y, classes=[name, "b", "c"])
    refused("two columns '1'", {1: X[:, 0], "1": X[:, 1]}, Y)
    refused("a table beside an array", {"a": X[:, 0]}, Y, test=(X[:, :1], Y))
    refused(r"images \[N, H, W, C\]", np.zeros((2, 100, 3)), [0, 1], kind="signal", channels_last=True)
    refused("at most 4 channels as the last axis", np.zeros((2, 8, 8, 6)), [0, 1], channels_last=True)
    refused("a Path: |a PosixPath", Path("somewhere"), Y)
    refused("a generator", (row for row in X), Y)
    refused(r"complex64 \[60, 3\]", X * 1j, Y)
    refused("`channels_last`", "embedded", channels_last=True)
    refused("`root`", X, Y, root="somewhere")
    refused("`targets`.*None for the dataset 'embedded'", "embedded", Y)
    refused("`test`", "embedded", test=(X, Y))


def test_a_place_without_room_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(errors.DataError, match="arrays in"):
        meristem.Dataset(X, Y)
    cache.unlink()
    # Refused data leave no file.
    with pytest.raises(errors.DataError):
        meristem.Dataset(X * np.nan, Y)
    assert list(cache.iterdir()) == []

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(errors.DataError, match="No space left.*"):
        meristem.Dataset(X, Y)
    assert list(cache.iterdir()) == []


def test_a_damaged_file_is_written_again(cache: Path) -> None:
    meristem.Dataset(X, Y)
    [file] = cache.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-9], whole[:200] + b"?" + whole[201:]):
        file.write_bytes(damaged)
        meristem.clear_cache()
        assert np.array_equal(gathered(meristem.Dataset(X, Y))[0], X)
        assert file.read_bytes() == whole and list(cache.iterdir()) == [file]


def test_members_of_classes_of_text_are_their_text() -> None:
    class Tree(str, Enum):
        OAK = "oak"
        ELM = "elm"

    labels = [list(Tree)[y % 2] for y in Y]
    for given in (labels, np.array(labels, dtype=object)):
        assert meristem.Dataset(X, given).classes == ["elm", "oak"]
    assert meristem.Dataset(X, labels, classes=list(Tree)).classes == ["oak", "elm"]
    assert meristem.Dataset(X, Y, classes=(name for name in "abc")).classes == ["a", "b", "c"]


def test_a_run_takes_a_dataset_and_is_resumed_by_name_alone(tmp_path: Path) -> None:
    data = meristem.Dataset(X, np.array(["oak", "elm", "fir"])[Y], test=(X[:6], ["oak"] * 6))
    settings = {"host": "mlp:8,8", "blueprints": "vectors", "envs": 1, "batch": 8, "controller": "random"}
    whole = meristem.train(dataset=data, steps=4, run_dir=tmp_path / "whole", **settings)
    assert whole.summary is not None and whole.summary["status"] == "completed"
    weights = meristem.weights.load(next((whole.path / "weights").glob("*.safetensors")))
    assert "elm" in weights.metadata["classes"]
    meristem.train(dataset=data, steps=2, run_dir=tmp_path / "part", **settings)
    part = meristem.resume(tmp_path / "part", steps=4)
    read = [(run.path / "weights" / "env-0.safetensors").read_bytes() for run in (whole, part)]
    assert read[0] == read[1]
    with pytest.raises(errors.SettingError, match="`data_root`.*beside a `meristem.Dataset`"):
        meristem.train(dataset=data, data_root=tmp_path, run_dir=tmp_path / "none", **settings)
    assert not (tmp_path / "none").exists()
    # Any dataset object stands for its settings.
    points = meristem.Dataset("blobs")
    run = meristem.train(dataset=points, steps=1, run_dir=tmp_path / "blobs", **settings)
    assert run.settings["dataset"] == "blobs"
