"""Training of a policy: its lines, its use, and its continuation after Ctrl-C."""

import signal

import pytest

import meristem
from meristem.errors import ResumeError, SettingError

TINY = {
    "rounds": 2,
    "envs": 4,
    "evaluation_tasks": 1,
    "evaluation_envs": 2,
    "teacher_rounds": 1,
    "envs_per_member": 2,
    "settings": {"blueprints": ["vectors"], "policy_hidden": 8, "ppo_minibatches": 2, "batch": 64, "steps": 4},
    "task": {"dataset": {"choice": ["blobs", "spirals"]}, "train": {"int": [200, 300]}, "test": {"choice": [50]}},
    "members": {"host": {"choice": ["mlp:4,4", "mlp:8"]}, "lr": {"log_uniform": [0.02, 0.2]}},
}
SIGNALS = {
    "task": {"dataset": {"choice": ["mnist1d"]}},
    "members": {"host": {"choice": ["conv1d:4,4"]}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_tasks_of_families_have_their_own_spaces():
    request = {**TINY, "rounds": 1, "evaluation_tasks": 6, "families": [{}, SIGNALS]}
    lines = meristem.train_policy("families", **request)
    families = lines[0]["families"]
    assert len(families) == 6 and set(families) == {0, 1}
    assert len(lines[0]["controllers"]["greedy"]["returns"]) == 6


def without_seconds(lines):
    return [{key: own for key, own in line.items() if not key.endswith("seconds")} for line in lines]


def test_a_stopped_training_continues_to_the_same_policy(tmp_path):
    seen = []
    whole = meristem.train_policy("whole", on_line=seen.append, **TINY)
    assert seen == whole and [line["kind"] for line in whole] == ["evaluation", "round", "round", "evaluation"]

    def interrupt(line):
        if line["kind"] == "round":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        meristem.train_policy("parts", on_line=interrupt, **TINY)
    lines = meristem.train_policy("parts", **TINY)
    assert without_seconds(lines) == without_seconds(whole)
    for file in ["policy.safetensors", "state.safetensors"]:
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert len((tmp_path / "parts/curves.jsonl").read_text().splitlines()) == 4
    run = meristem.train(
        dataset="blobs",
        host="mlp:6,6,6",
        blueprints=["vectors"],
        controller="greedy:whole/policy.safetensors",
        steps=3,
    )
    assert run.summary["status"] == "completed"
    with pytest.raises(ResumeError, match="envs"):
        meristem.train_policy("whole", **{**TINY, "envs": 2})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounds": 0}, "1 to"),
        ({"colour": 1}, "colour"),
        ({"settings": {"lrr": 1}}, "did you mean `lr`"),
        ({"task": {"lr": {"uniform": [0, float("nan")]}}}, "numbers"),
        ({"members": {"lr": object()}}, "numbers"),
        ({"families": [{"weight": 0}]}, "1 to 1000"),
        ({"families": [3]}, "tables"),
    ],
)
def test_requests_that_do_not_fit_are_refused(tmp_path, given, words):
    with pytest.raises(SettingError, match=words):
        meristem.train_policy("bad", **{**TINY, **given})
    assert not (tmp_path / "bad").exists()
