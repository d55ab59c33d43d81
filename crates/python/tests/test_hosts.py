"""Hosts without weights."""

from pathlib import Path

import pytest

import meristem
from meristem import errors


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
        ("deep", {"input": (3, 32)}, "expected channels, rows and columns"),
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
