"""Invalid arguments raise an error of the package that names the argument."""

import re
from pathlib import Path

import numpy as np
import pytest

import meristem
from meristem import Comm, errors

#: Values that are no whole number, or none that fits.
NO_COUNTS = [-1, 2**64, 10**30, True, np.True_, 1.5, np.float32(2), float("nan"), "3", b"3", [], {}, 1j]


def named(call, argument: str, kind: type[errors.MeristemError]) -> None:
    """Asserts that the call raises an error of the package that names the argument."""
    with pytest.raises(errors.MeristemError) as caught:
        call()
    error = caught.value
    assert isinstance(error, kind) and error.exit_code == 2, repr(error)
    assert re.match(rf"`{argument}[`\\[]", error.message), error.message
    assert "got" in error.message and "expected" in error.message and error.remedy


@pytest.mark.parametrize("value", NO_COUNTS)
@pytest.mark.parametrize(
    "argument", ["batch", "envs", "seed", "crop", "cutout", "max_batches", "resize", "budget"]
)
def test_counts_of_the_data_classes(argument, value):
    if argument in ("resize", "budget"):
        named(lambda: meristem.Dataset(**{argument: value}), argument, errors.DataError)
    else:
        data = meristem.Dataset()
        call = lambda: meristem.GatherBatches(data, **{argument: value})  # noqa: E731
        named(call, argument, errors.DataError)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("shuffle", 1),
        ("drop_last", "no"),
        ("flip", 0.0),
        ("epoch", 3),
        ("subset", 5),
        ("subset", "12"),
        ("subset", [1.5]),
        ("subset", [-1]),
        ("subset", np.array([True, False])),
        ("parts", 5),
        ("parts", [5]),
        ("parts", [[1.5]]),
        ("normalize", 0.5),
        ("normalize", ([0.5],)),
        ("normalize", (["a"], [1.0])),
        ("normalize", ([10**400], [1.0])),
        ("dataset", 3),
    ],
)
def test_other_arguments_of_a_gather(argument, value):
    given = {"dataset": meristem.Dataset(), argument: value}
    named(lambda: meristem.GatherBatches(**given), argument, errors.DataError)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("dataset", None),
        ("dataset", "\ud800"),
        ("split", 1),
        ("root", 3),
        ("root", b"folder"),
        ("root", "a\0b"),
        ("skip_bad", "yes"),
        ("device", 0),
    ],
)
def test_other_arguments_of_a_dataset(argument, value):
    named(lambda: meristem.Dataset(**{argument: value}), argument, errors.DataError)


@pytest.mark.parametrize("value", NO_COUNTS)
def test_the_number_of_an_epoch_is_checked_by_the_call(value):
    batches = meristem.GatherBatches(meristem.Dataset(), 8, max_batches=1)
    named(lambda: batches.epoch(value), "number", errors.DataError)


def test_numbers_of_numpy_and_sequences_of_all_kinds_are_accepted():
    data = meristem.Dataset()
    batches = meristem.GatherBatches(
        data,
        np.int32(8),
        envs=np.uint8(2),
        seed=2**64 - 1,
        subset=(at for at in range(16)),
        normalize=(np.array([0.5], np.float32), (1,)),
        flip=np.True_,
    )
    assert len(list(batches.epoch(np.int64(3)))) == len(batches) == 2
    assert len(meristem.GatherBatches(data, 8, subset=np.arange(16, dtype=np.uint16))) == 2


@pytest.mark.parametrize("value", NO_COUNTS)
def test_numbers_of_a_group(value):
    named(lambda: Comm.threads(value), "ranks", errors.ArgumentError)
    [comm] = Comm.threads(1)
    named(lambda: comm.top_k(k=value), "k", errors.ArgumentError)
    named(lambda: comm.broadcast(np.zeros(3), root=value), "root", errors.ArgumentError)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("density", "1"),
        ("density", True),
        ("density", 10**400),
        ("method", 3),
        ("residual", 1),
        ("momentum", "0.5"),
        ("mean", "no"),
    ],
)
def test_options_of_a_sum(argument, value):
    [comm] = Comm.threads(1)
    named(lambda: comm.top_k(**{argument: value}), argument, errors.ArgumentError)


@pytest.mark.parametrize("value", ["60", None, [], True, 10**400])
def test_a_deadline_is_a_number(value):
    named(lambda: Comm.threads(1, deadline=value), "deadline", errors.ArgumentError)


def test_an_invalid_argument_is_an_error_on_the_other_ranks():
    outcomes = []

    def work(comm):
        try:
            comm.all_reduce(np.zeros(3, np.float32), mean="no" if comm.rank else False)
        except errors.MeristemError as error:
            outcomes.append(error)

    Comm.run(2, work, deadline=300)
    own, told = sorted(outcomes, key=lambda error: type(error).__name__)
    assert isinstance(own, errors.ArgumentError) and isinstance(told, errors.RankError)
    assert "rank 1 failed: `mean`: got 'no'" in told.message


@pytest.mark.parametrize("value", NO_COUNTS)
def test_the_number_of_an_env(trained, value):
    named(lambda: trained.weights(value), "env", errors.ArgumentError)


@pytest.mark.parametrize("value", NO_COUNTS)
def test_the_number_of_an_env_of_a_fleet(fleet, value):
    named(lambda: fleet.weights(value), "env", errors.ArgumentError)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet") / "run"
    settings = {"preset": "quick", "host": "minimal", "max_batches": 1, "threads": 1}
    with meristem.Fleet(**settings, envs=1, run_dir=folder) as fleet:
        yield fleet


@pytest.mark.parametrize("value", [3, 1.5, b"run", ["run"]])
def test_paths(value):
    for call, argument, kind in [
        (lambda: meristem.Run(value), "path", errors.ArgumentError),
        (lambda: meristem.resume(value), "run", errors.ArgumentError),
        (lambda: meristem.Fleet.resume(value), "run", errors.ArgumentError),
        (lambda: meristem.train(config=value), "config", errors.SettingError),
        (lambda: meristem.Fleet(config=value), "config", errors.SettingError),
        (lambda: meristem.weights.load(value), "path", errors.WeightsError),
    ]:
        named(call, argument, kind)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"on_event": 3}, "`on_event`: got 3, expected a function of an event"),
        ({"config": {3: 4}}, "`config`: got 3, expected text"),
        ({"config": {"": 4}}, "unknown"),
        ({"steps": {1}}, "`steps`: got a set"),
        ({"steps": 1j}, "`steps`: got a complex"),
        ({"steps": True}, "`steps`"),
        ({"steps": 2.5}, "`steps`"),
        ({"lr": float("nan")}, "`lr`"),
        ({"steps": 10**30}, "`steps`"),
        ({"slots": [["r0c0"], ["r0c1"]]}, "`slots`: got a list of lists"),
        ({"host": "\ud800"}, "`host`: got text that is not UTF-8"),
        ({"run_dir": Path("runs/\udcff")}, "`run_dir`: got `runs/\ufffd`, expected a path that is UTF-8"),
    ],
)
def test_settings(settings, text):
    with pytest.raises(errors.SettingError) as caught:
        meristem.train(**settings)
    assert text in str(caught.value)
