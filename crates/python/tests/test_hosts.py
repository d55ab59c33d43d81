"""Hosts without weights."""

import re
from pathlib import Path
from typing import Any

import pytest

import meristem
from meristem import errors, nn


def test_a_summary_has_layers_and_totals() -> None:
    summary = meristem.Host("baseline").summary(input=(3, 32, 32))
    assert (summary.parameters, summary.macs, summary.slots) == (6418, 811_328, 6)
    first, slot = summary.layers[0], summary.layers[3]
    assert (first.name, first.layer, first.output) == ("blocks.0.conv", "conv 3×3", (8, 32, 32))
    assert (slot.name, slot.layer, slot.parameters) == ("r0c0", "slot", 0)
    assert sum(layer.parameters for layer in summary.layers) == summary.parameters
    lines = str(summary).splitlines()
    assert lines[0] == "cnn:channels=8,blocks=3,kernel=3,pools=3"
    assert lines[2].split() == ["blocks.0.conv", "conv", "3×3", "8×32×32", "216", "221,184"]
    assert lines[-1].split() == ["all", "6,418", "811,328"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_the_parameters_are_those_of_a_run(tmp_path: Path) -> None:
    run = meristem.train(
        host="minimal", envs=1, steps=1, max_batches=1, batch=8, run_dir=tmp_path / "run"
    )
    assert run.summary["envs"][0]["host_parameters"] == meristem.Host("minimal").summary().parameters


@pytest.mark.parametrize(
    ("host", "arguments", "words"),
    [
        ("basline", {}, "did you mean `baseline`"),
        ("deep", {"input": (3, 4, 4)}, "too deep for 3×4×4 images"),
        ("deep", {"input": (3, 32, 32, 1)}, "expected channels, rows and columns"),
        ("deep", {"input": (3, 32)}, "too deep for 3×1×32 images"),
        ("deep", {"input": "3x32x32"}, "expected channels, rows and columns"),
        ("deep", {"input": (3, 32, 1.5)}, "`input`: got 1.5, expected a whole number"),
        ("deep", {"input": (3, 0, 32)}, "`input`: got 0"),
        ("deep", {"input": (2**70, 32, 32)}, "`input`: got"),
        ("deep", {"classes": -1}, "`classes`: got -1"),
        ("deep", {"classes": 10**9}, "`classes` must be"),
    ],
)
def test_what_cannot_be_is_refused(host: str, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(errors.SettingError) as raised:
        meristem.Host(host).summary(**arguments)  # type: ignore[arg-type]
    assert words in str(raised.value)


def test_a_host_is_described_by_text() -> None:
    with pytest.raises(errors.SettingError):
        meristem.Host(7)  # type: ignore[arg-type]


PAGE = (Path(__file__).parents[3] / "docs" / "hosts.md").read_text()


def block(name: str) -> str:
    """A block of docs/hosts.md."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(block("own.toml"))
    names: dict[str, Any] = {}
    exec(compile(block("python"), "docs/hosts.md", "exec"), names)
    own, run = names["own"], names["run"]
    assert run.settings["host"] == own.description
    assert set(run.events["run_started"]["host"]) == {own.description}
    own.save("own.json")
    assert meristem.Host("own.json") == own == meristem.Host(Path("own.toml"))
    assert meristem.Host("own.json").description == own.description
    with pytest.raises(FileExistsError):
        own.save("own.json")
    with pytest.raises(errors.SettingError, match="ends in .json"):
        own.save("own.toml")


def test_members_have_rates_of_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block("dropout"), "docs/hosts.md", "exec"), names)
    run = names["run"]
    assert len({place["control"]["mean"] for place in run.leaderboard}) == 3
    with pytest.raises(errors.SettingError, match="has no dropout layers"):
        meristem.train(host="mlp:8", dataset="mnist1d", dropout=0.1, controller="none", steps=1)


def test_a_host_and_weights_are_drawn_in_notebooks(tiny: dict[str, Any], tmp_path: Path) -> None:
    host = meristem.Host(nn.Flatten(), nn.Linear(8), nn.Slot("a"), nn.Linear("classes"))
    picture = host._repr_svg_()
    assert picture == host.svg() and picture.startswith("<svg") and picture.endswith("</svg>\n")
    assert all(f">{text}</text>" in picture for text in ("flatten", "linear", "a"))
    plant = {"op": "GERMINATE", "slot": "r0c0", "blueprint": "conv_light"}
    run = meristem.train(
        **{**tiny, "min_training_steps": 1}, controller=lambda env: plant if env.step == 1 else None
    )
    weights = meristem.weights.load(run.weights(0))
    drawn = weights._repr_svg_()
    assert drawn is not None and ">conv_light</text>" in drawn and ">dormant</text>" in drawn
    [stage] = {slot["stage"] for slot in weights.metadata["topology"]["slots"]} - {"dormant"}
    assert f'fill="{ {"germinated": "#f0e442", "training": "#56b4e9"}[stage] }"' in drawn
    assert ">conv_light</text>" not in meristem.Host("minimal").svg()
    bare = meristem.weights.Weights({}, {})
    assert bare._repr_svg_() is None
    for broken in (bare, meristem.weights.Weights({}, {"topology": {"host": "nothing", "slots": []}})):
        with pytest.raises(errors.WeightsError, match="no sound `topology`"):
            broken.svg()


ACTIVATIONS = (nn.ELU, nn.GELU, nn.GELUTanh, nn.SiLU, nn.Softplus, nn.HardSwish)


def test_every_layer_survives_a_description() -> None:
    layers = [
        nn.Conv2d(8, (3, 5), stride=(1, 2), padding=(1, 0), groups=1, bias=True, name="stem"),
        nn.Slot("a"),
        nn.Residual(nn.GroupNorm(4), nn.Tanh(), shortcut=[nn.Conv2d(8, 1, padding="valid")]),
        nn.Branches([], [nn.Sigmoid(), nn.BatchNorm()], join="add", name="both"),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Save("b"),
        nn.AvgPool2d((1, 2), stride=1),
        nn.Branches([nn.GlobalMaxPool()], [nn.GlobalAvgPool()], join="concat"),
        nn.Save("c"),
        nn.LayerNorm(),
        nn.RMSNorm(name="rms"),
        nn.ReLU(),
        nn.Join("c", join="multiply"),
        nn.Save("d"),
        nn.Load("c"),
        nn.Join("d", join="add"),
        nn.LeakyReLU(),
        nn.LeakyReLU(0.25),
        *(layer() for layer in ACTIVATIONS),
        nn.Dropout(0.2),
        nn.Dropout(0.0, name="last"),
        nn.Flatten(),
        nn.Linear(7, bias=False),
        nn.Linear("classes"),
    ]
    host = meristem.Host(*layers, name="all", slots=["a"])
    again = meristem.Host(*host.layers, name="all")
    assert again == host and again.description == host.description
    assert hash(again) == hash(host) and host != meristem.Host("deep")
    inside = {nn.GroupNorm, nn.Tanh, nn.Sigmoid, nn.BatchNorm, nn.GlobalMaxPool, nn.GlobalAvgPool}
    signals = {nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d}
    assert {type(layer) for layer in layers} | inside | signals == set(nn.KINDS.values())
    assert [layer.name for layer in host.summary((3, 9, 9)).layers if layer.depth] == [
        "layers.2.body.0",
        None,
        "layers.2.shortcut.0",
        None,
        "both.branches.1.1",
        None,
        None,
    ]
    ready = meristem.Host("resnet8")
    assert meristem.Host(*ready.layers) == ready


def test_a_linear_layer_has_the_outputs_of_the_dataset_by_default() -> None:
    layers = [nn.Conv2d(16, 3), nn.BatchNorm(), nn.ReLU(), nn.Slot("stem"), nn.GlobalAvgPool()]
    host = meristem.Host(*layers, nn.Linear())
    assert host == meristem.Host(*layers, nn.Linear("classes")) and nn.Linear().out == "classes"
    assert [host.summary((3, 8, 8), classes=n).layers[-1].output for n in (4, 7)] == [(4, 1, 1), (7, 1, 1)]
    without = meristem.Host(*layers, nn.Linear(bias=False, name="head"))
    assert meristem.Host(*without.layers) == without
    assert without.layers[-1] == nn.Linear("classes", bias=False, name="head")


def test_layers_of_signals_survive_a_description() -> None:
    host = meristem.Host(
        nn.Conv1d(8, 5, 2, 3, groups=2, bias=True, dilation=2, name="stem"),
        nn.MaxPool1d(3, 2, 1),
        nn.Slot("a"),
        nn.Conv1d(6, 3, padding="valid"),
        nn.AvgPool1d(2),
        nn.GlobalAvgPool(),
        nn.Linear("classes"),
    )
    again = meristem.Host(*host.layers)
    assert again == host and again.description == host.description
    summary = host.summary((2, 40))
    assert [layer.output for layer in summary.layers[:5]] == [
        (8, 1, 19), (8, 1, 10), (8, 1, 10), (6, 1, 8), (6, 1, 4),
    ]  # fmt: skip
    with pytest.raises(errors.SettingError, match="it takes signals, .* use `conv2d`"):
        host.summary((2, 40, 40))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([nn.ReLU(), "relu"], "layer 1 of Host: got 'relu', expected a layer of meristem.nn"),
        ([nn.Residual(3)], "layer 0 of Residual: got 3"),  # type: ignore[arg-type]
        ([nn.Conv2d(0, 3)], "`layers.0`: `out` must be 1 to 65536, got 0"),
        ([nn.Dropout(1.0)], "`layers.0`: `p` must be from 0 to below 1, got 1"),
        ([nn.Conv2d("a", 3)], "layers.0: `conv2d`: invalid type"),  # type: ignore[arg-type]
        ([nn.Slot("a"), nn.Slot("a")], "two slots have the name `a`"),
        ([nn.Branches([nn.ReLU()], join="add")], "expected at least 2 branches, got 1"),
    ],
)
def test_a_layer_that_cannot_be_is_named(layers: list[Any], words: str) -> None:
    with pytest.raises(errors.SettingError) as raised:
        meristem.Host(*layers)
    assert words in str(raised.value)
    with pytest.raises(errors.SettingError):
        meristem.Host("deep", name="other")
