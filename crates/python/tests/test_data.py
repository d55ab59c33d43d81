"""Datasets and gathered batches."""

import gc
import threading

import numpy as np
import pytest

import meristem
from meristem import errors


@pytest.fixture(scope="module")
def data() -> meristem.Dataset:
    return meristem.Dataset()


def test_a_dataset_has_its_description(data):
    assert (data.name, data.shape, len(data)) == ("embedded", (1, 28, 28), 10_000)
    assert len(data.classes) == 10 and 0 < data.mean[0] < 1 and data.std[0] > 0
    assert len(meristem.Dataset(split="test")) == 2_500


def test_batches_come_without_a_copy_and_channels_last(data):
    batches = meristem.GatherBatches(data, 16, envs=2, max_batches=3)
    seen = 0
    for parts in batches.epoch(0):
        assert [part.env for part in parts] == [0, 1]
        for _, inputs, targets in parts:
            x, y = np.from_dlpack(inputs), np.from_dlpack(targets)
            assert x.shape == (16, 1, 28, 28) and x.dtype == np.float32
            assert x.strides == (28 * 28 * 4, 4, 28 * 4, 4)
            assert y.dtype == np.int32 and (y >= 0).all() and (y < 10).all()
            again = np.from_dlpack(inputs)
            assert again.ctypes.data == x.ctypes.data and x.flags.writeable
        seen += 1
    assert seen == len(batches) == 3


def test_an_epoch_is_the_dataset_in_its_order(data):
    batches = meristem.GatherBatches(data, 3000, shuffle=False, normalize=([0.0], [1.0]))
    parts = [np.from_dlpack(part.inputs).copy() for [part] in batches.epoch(0)]
    assert [len(part) for part in parts] == [3000, 3000, 3000, 1000]
    images = np.concatenate(parts)
    assert abs(images.mean(dtype=np.float64) - data.mean[0]) < 1e-5
    assert abs(images.std(dtype=np.float64) - data.std[0]) < 1e-4


def test_the_same_seed_gives_the_same_batches(data):
    def gathered(seed: int, epoch: int) -> np.ndarray:
        batches = meristem.GatherBatches(data, 32, seed=seed, crop=4, flip=True, max_batches=2)
        return np.concatenate([np.from_dlpack(b.inputs) for [b] in batches.epoch(epoch)])

    assert (gathered(7, 1) == gathered(7, 1)).all()
    assert (gathered(7, 1) != gathered(7, 2)).any() and (gathered(7, 1) != gathered(8, 1)).any()


def test_an_array_outlives_everything_that_it_came_from(data):
    batches = meristem.GatherBatches(data, 8, max_batches=20)
    held = [np.from_dlpack(batch.inputs) for [batch] in batches.epoch(0)]
    assert batches.added_buffers > 0
    copies = [x.copy() for x in held]
    list(batches.epoch(1))
    del batches
    gc.collect()
    assert all((x == copy).all() for x, copy in zip(held, copies, strict=True))
    assert len({x.ctypes.data for x in held}) == 20


def test_the_memory_of_a_dropped_batch_is_reused(data):
    batches = meristem.GatherBatches(data, 8)
    for _ in batches.epoch(0):
        pass
    assert batches.added_buffers <= 1


def test_an_unused_capsule_frees_its_memory(data):
    [batch] = next(meristem.GatherBatches(data, 8).epoch(0))
    for version in (None, (1, 0)):
        assert "dltensor" in repr(batch.inputs.__dlpack__(max_version=version))
    copy = np.from_dlpack(batch.inputs, copy=True)
    assert copy.ctypes.data != np.from_dlpack(batch.inputs).ctypes.data
    assert (copy == np.from_dlpack(batch.inputs)).all()


def test_unsupported_requests_of_a_consumer_are_errors(data):
    [batch] = next(meristem.GatherBatches(data, 8).epoch(0))
    with pytest.raises(BufferError, match="dl_device: got"):
        batch.inputs.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="stream: got one, expected None"):
        batch.inputs.__dlpack__(stream=1)


def test_each_env_has_the_samples_of_its_part(data):
    parts = [np.arange(20), [5, 5, 7]]
    batches = meristem.GatherBatches(data, 8, envs=2, parts=parts, shuffle=False)
    [whole] = next(meristem.GatherBatches(data, 20, shuffle=False).epoch())
    images, labels = np.asarray(whole.inputs), np.asarray(whole.targets)
    assert [[batch.env for batch in batch_of_all] for batch_of_all in batches.epoch()] == [[0, 1], [0], [0]]
    for env, part in enumerate(parts):
        of_env = [batch for batch_of_all in batches.epoch() for batch in batch_of_all if batch.env == env]
        copies = [(np.array(batch.inputs), np.array(batch.targets)) for batch in of_env]
        assert np.array_equal(np.concatenate([inputs for inputs, _ in copies]), images[part])
        assert np.array_equal(np.concatenate([targets for _, targets in copies]), labels[part])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "`batch`: got 0, expected 1 to 4294967295"),
        ({"envs": 0}, "`envs`: got 0, expected 1 to 65536"),
        ({"epoch": "half"}, "`epoch` must be"),
        ({"subset": [10_000]}, "`subset` must be indices below 10000"),
        ({"parts": [[10_000]]}, "`parts` must be indices below 10000"),
        ({"parts": [[0], [1]]}, "`parts` must be a part for each of the 1 envs, got 2"),
        ({"parts": [[0]], "subset": [0]}, "expected None with `subset`"),
        ({"normalize": ([0.0], [0.0])}, "`normalize` must be"),
        ({"cutout": 99}, "must be"),
    ],
)
def test_an_invalid_argument_is_named(data, options, text):
    with pytest.raises(errors.DataError) as caught:
        meristem.GatherBatches(data, **options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"dataset": "cifar"}, errors.SettingError, "did you mean `cifar10`?"),
        ({"dataset": "cifar10"}, errors.DataError, "cifar10"),
        ({"split": "dev"}, errors.DataError, "got `dev`, expected train or test"),
        # Not part of this build, or not there.
        ({"device": "cuda:63"}, (errors.SettingError, errors.DeviceError), "cuda:63"),
    ],
)
def test_a_missing_dataset_is_an_error(options, kind, text):
    with pytest.raises(kind) as caught:
        meristem.Dataset(**options)
    assert text in str(caught.value)


def test_an_epoch_ends_when_another_starts(data):
    batches = meristem.GatherBatches(data, 8)
    first, second = batches.epoch(0), batches.epoch(1)
    next(first)
    next(second)
    with pytest.raises(errors.StateError, match="ended by the start of another"):
        next(first)


def test_two_threads_get_batches_or_a_named_error(data):
    batches = meristem.GatherBatches(data, 512, envs=2)
    refused = []

    def work():
        for epoch in range(3):
            try:
                list(batches.epoch(epoch))
            except errors.StateError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another" in text for text in refused)
    assert len(list(batches.epoch(0))) == len(batches)


def arrays(seed: int, images: int = 40) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "train_images": random.integers(0, 256, (images, 8, 8), dtype=np.uint8),
        "train_labels": (np.arange(images) + seed) % 3,
        "test_images": random.integers(0, 256, (9, 8, 8), dtype=np.uint8),
        "test_labels": np.arange(9) % 3,
    }


def served(data: meristem.Dataset) -> tuple[np.ndarray, np.ndarray]:
    batches = meristem.GatherBatches(data, 64, shuffle=False, normalize=([0.0], [1.0]))
    [[batch]] = batches.epoch(0)
    bytes_ = np.round(np.from_dlpack(batch.inputs)[:, 0] * 255).astype(np.uint8)
    return bytes_, np.from_dlpack(batch.targets).copy()


def test_a_rewritten_file_is_loaded_anew(tmp_path):
    path = tmp_path / "d.npz"
    for first, second in [(arrays(1), arrays(2)), (arrays(3), arrays(4, images=50))]:
        np.savez(path, **first)
        old = meristem.Dataset("arrays", root=path)
        np.savez(path, **second)
        new = meristem.Dataset("arrays", root=path)
        for data, given in [(old, first), (new, second)]:
            images, labels = served(data)
            assert (images == given["train_images"]).all()
            assert (labels == given["train_labels"]).all()
        assert new.mean != old.mean


def test_a_run_trains_on_the_current_file(tiny, tmp_path):
    def trained(name: str) -> meristem.Run:
        given = tiny | {"dataset": "arrays", "data_root": path, "control_split": 0.1}
        return meristem.train(**given | {"run_dir": tmp_path / name})

    path = tmp_path / "d.npz"
    np.savez(path, **arrays(1))
    held = meristem.Dataset("arrays", root=path)
    np.savez(path, **arrays(2))
    changed = trained("changed")
    assert (served(held)[0] == arrays(1)["train_images"]).all()
    meristem.clear_cache()
    fresh = trained("fresh")
    assert changed.summary["dataset"] == fresh.summary["dataset"]
    losses = [run.events["step_completed"]["train_loss"] for run in (changed, fresh)]
    assert (losses[0] == losses[1]).all()


def test_numpy_accepts_the_arrays(data):
    [batch] = next(meristem.GatherBatches(data, 4).epoch(0))
    x = np.from_dlpack(batch.inputs)
    for array in (np.asarray(batch.inputs), np.array(batch.inputs, copy=False)):
        assert array.dtype == np.float32 and array.shape == (4, 1, 28, 28)
        assert array.ctypes.data == x.ctypes.data
    for copy in (np.array(batch.inputs), np.asarray(batch.inputs, copy=True)):
        assert copy.ctypes.data != x.ctypes.data and (copy == x).all()
    wide = np.asarray(batch.inputs, np.float64)
    assert wide.dtype == np.float64 and (wide == x).all()
    with pytest.raises(ValueError, match="copy"):
        np.asarray(batch.inputs, np.float64, copy=False)
    assert np.stack([batch.targets, batch.targets]).dtype == np.int32
    assert np.mean(batch.inputs) == x.mean()
    del batch
    gc.collect()
    assert (array == x).all()
