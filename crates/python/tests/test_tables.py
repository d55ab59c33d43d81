"""Datasets in CSV files (D13)."""

import numpy as np
import pytest

import meristem
from meristem import errors


@pytest.fixture
def file(tmp_path):
    rows = "".join(f"{i % 9 or ''},{'red' if i % 2 else 'blue'},{i % 3},{i}.5\n" for i in range(60))
    path = tmp_path / "table.csv"
    path.write_text("size,colour,rooms,price\n" + rows)
    return path


def test_a_table_is_a_dataset_and_trains(file, tmp_path):
    data = meristem.Dataset("table", root=file, target="price", missing="fill")
    assert (data.name, data.kind, data.shape, data.targets) == ("table", "vector", (4,), "numbers")
    assert data.target_mean == [30.0]
    run = meristem.train(
        dataset=data, host="mlp:8", controller="none", envs=1, steps=2, run_dir=tmp_path / "run"
    )
    assert run.summary["task"] == "regress"
    settings = {"dataset": "table", "data_root": str(file), "target": ["price"], "missing": "fill"}
    assert data.settings == settings


def test_whole_numbers_are_classes_unless_the_task_is_regress(file):
    options = {"root": file, "target": ["rooms"], "missing": "fill"}
    assert meristem.Dataset("table", **options).classes == ["0", "1", "2"]
    numbers = meristem.Dataset("table", task="regress", **options)
    assert numbers.targets == "numbers" and numbers.settings["task"] == "regress"
    assert np.allclose(numbers.target_mean, [1.0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "price"}, "`size` in line 2 must be a value"),
        ({"target": "prise", "missing": "fill"}, "got `prise`"),
        ({}, "got none"),
        ({"target": 3}, "a list of names"),
        ({"target": "price", "missing": "drop"}, "refuse or fill"),
        ({"target": "price", "task": "multilabel"}, "`task`"),
    ],
)
def test_bad_options_are_named(file, options, words):
    with pytest.raises(errors.DataError, match=words):
        meristem.Dataset("table", root=file, **options)


def test_other_datasets_have_no_target_columns():
    with pytest.raises(errors.SettingError, match="only with dataset table"):
        meristem.Dataset("blobs", target="price")
