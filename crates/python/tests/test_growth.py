"""The bench of growth: its table, its continuation after Ctrl-C, and refused requests."""

import json
import signal

import pytest

import meristem
from meristem.errors import ResumeError, RunFolderError, SettingError

QUICK = {"suite": "quick", "tasks": ["spirals"], "rates": [0.1, 0.3], "seeds": 2, "threads": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def without_seconds(value):
    """Without the only numbers that differ between two benches."""
    if isinstance(value, dict):
        return {key: without_seconds(own) for key, own in value.items() if key not in ("seconds", "crc32")}
    return [without_seconds(own) for own in value] if isinstance(value, list) else value


def test_an_interrupted_bench_continues_to_the_same_table(tmp_path):
    whole = meristem.growth_bench("whole", **QUICK)
    assert whole["status"] == "completed"
    methods = {own["method"]: own for own in whole["tasks"][0]["methods"]}
    assert methods["static"]["parameters"] == methods["heuristic"]["parameters"]
    assert methods["large"]["difference_pp"]["heuristic"]["count"] == 2
    assert methods["policy"]["test_score"]["count"] == 2, "the policy serves a host with two slots"
    seen = []

    def interrupt(event):
        seen.append(event)
        if len(seen) == 150:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        meristem.growth_bench("parts", on_event=interrupt, **QUICK)
    table = json.loads((tmp_path / "parts/growth.json").read_text())
    assert table["status"] == "interrupted"
    assert without_seconds(meristem.growth_bench("parts", **QUICK)) == without_seconds(whole)
    assert "| static-compute |" in (tmp_path / "parts/growth.md").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"suite": "smal"}, "did you mean `small`"),
        ({"tasks": ["cifar10"]}, "one of spirals"),
        ({"tasks": "spirals"}, "a list of names"),
        ({"methods": ["heuristics"]}, "did you mean `heuristic`"),
        ({"seeds": 0}, "1 to 10000"),
        ({"seeds": 1.5}, "a whole number"),
        ({"rates": [0.3, 0.1]}, "increasing order"),
        ({"rates": [float("nan")]}, "above 0"),
        ({"lr": 0.1}, "does not decide"),
        ({"dataset": "blobs"}, "does not decide"),
        ({"folds": 2}, "does not decide"),
        ({"stepz": 2}, "steps"),
        ({"data_root": "x"}, "no task of the bench reads files"),
    ],
)
def test_refused_requests(given, words, tmp_path):
    with pytest.raises(SettingError, match=words):
        meristem.growth_bench("new", **{**QUICK, **given})
    assert not (tmp_path / "new").exists()


def test_folders_of_others(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").write_text("mine")
    with pytest.raises(RunFolderError, match="exists"):
        meristem.growth_bench("full", **QUICK)
    few = {**QUICK, "methods": ["none"], "seeds": 1, "rates": [0.1]}
    meristem.growth_bench("bench", **few)
    before = (tmp_path / "bench/growth.json").read_text()
    with pytest.raises(ResumeError, match="suite quick"):
        meristem.growth_bench("bench", **{**few, "suite": "small"})
    with pytest.raises(ResumeError, match="momentum"):
        meristem.growth_bench("bench", **few, momentum=0.5)
    assert (tmp_path / "bench/growth.json").read_text() == before


RULES = {"width_init": "variance_transfer", "growth_lr": "norm", "growth_momentum": "reset", "widen_place": "orthogonality"}


def test_rules_of_growth_are_settings():
    usual = {"dataset": "spirals", "host": "mlp:8,8", "controller": "heuristic", "max_modules": 0, "widen_by": 0.5}
    usual |= {"max_gap": 99, "envs": 1, "steps": 6, "threads": 1}
    measured = {"widen_trigger": "natural_gradient:0.01", "widen_place": "gradient_ratio"}
    for name, rules in (("usual", {}), ("other", RULES), ("measured", measured)):
        run = meristem.train(**usual, **rules, run_dir=name)
        assert list(run.events["layer_widened"]["layer"]), name
        assert all(f'{key} = "{value}"' in (run.path / "config.toml").read_text() for key, value in rules.items())
    with pytest.raises(SettingError, match="FACTOR:STEPS"):
        meristem.train(**usual, growth_lr="2", run_dir="no")


def test_a_host_without_slots_gets_wider():
    nn = meristem.nn
    host = meristem.Host(nn.Linear(6, name="one"), nn.ReLU(), nn.Linear(6, name="two"), nn.ReLU(), nn.Linear())
    usual = {"dataset": "spirals", "host": host, "envs": 1, "steps": 6, "threads": 1, "max_gap": 99}
    rules = meristem.train(**usual, controller="heuristic", widen_by=0.5, widen_pause=1, run_dir="rules")
    assert set(rules.events["layer_widened"]["layer"]) == {"one", "two"}

    def wider(env):
        return {"op": "WIDEN", "layer": "two", "by": 2} if env.step == 2 else None

    own = meristem.train(**usual, controller=wider, run_dir="own")
    assert list(own.events["layer_widened"]["layer"]) == ["two"]
    with pytest.raises(SettingError, match="a host with slots"):
        meristem.train(**usual, controller="heuristic", run_dir="no")
