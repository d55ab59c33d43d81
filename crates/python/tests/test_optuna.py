"""Searches of a program over the members of a fleet, and Optuna's."""

import subprocess
import sys
from pathlib import Path

import pytest

import meristem
from meristem.errors import MeristemError, SettingError

SETTINGS = {"dataset": "mnist1d", "host": "mlp:8", "max_batches": 3, "batch": 32, "seed": 3, "steps": 4}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Rates(meristem.Searcher):
    """Halves the rate from member to member, and stops every third member after two steps."""

    def __init__(self):
        self.calls = []

    def suggest(self, member):
        self.calls.append(("suggest", member))
        return {"lr": 0.5**member, "clip_norm": "off" if member % 2 else 2} if member else {}

    def report(self, member, steps, score):
        assert 0 <= score <= 1
        self.calls.append(("report", member, steps))
        return not (member % 3 == 2 and steps == 2)

    def complete(self, member, ended):
        self.calls.append(("complete", member, ended))


def test_a_searcher_chooses_members_as_places_become_free():
    search = Rates()
    run = meristem.sweep(search=search, samples=6, places=2, **SETTINGS, run_dir="run")
    begun = [call[1] for call in search.calls if call[0] == "suggest"]
    assert begun == list(range(6))
    ended = {call[1]: call[2] for call in search.calls if call[0] == "complete"}
    assert ended == {member: "stopped" if member % 3 == 2 else None for member in range(6)}
    steps = {place["number"]: place["steps"] for place in run.leaderboard}
    assert steps == {0: 4, 1: 4, 2: 2, 3: 4, 4: 4, 5: 2}
    settings = {place["number"]: place["member"] for place in run.leaderboard}
    assert (settings[0], settings[3]) == ("", "lr=0.125; clip_norm=off")
    # As members that were given at the start.
    members = [{"lr": 0.1}, *(Rates().suggest(member) for member in range(1, 6))]
    given = meristem.sweep(members=members, **SETTINGS)
    for member in (0, 1, 3, 4):
        assert run.weights(member).read_bytes() == given.weights(member).read_bytes(), member
    again = meristem.replay(run, 5)
    assert again.weights(0).read_bytes() == run.weights(5).read_bytes()


class Data(meristem.Searcher):
    """Chooses batch, seed and initial weights."""

    def suggest(self, member):
        own = {"batch": 16 + 8 * member, "seed": member}
        return {**own, "init": "w.safetensors"} if member % 2 else own


def test_a_searcher_chooses_batches_seeds_and_initial_weights(tmp_path, monkeypatch):
    first = meristem.train(**{**SETTINGS, "steps": 1}, controller="none", envs=1)
    (tmp_path / "w.safetensors").write_bytes(first.weights(0).read_bytes())
    settings = {**SETTINGS, "samples": 4}
    run = meristem.sweep(search=Data(), places=2, **settings)
    given = meristem.sweep(members=[Data().suggest(member) for member in range(4)], **SETTINGS)
    all_weights = [given.weights(member).read_bytes() for member in range(4)]
    assert [run.weights(member).read_bytes() for member in range(4)] == all_weights
    stopped = meristem.sweep(search=Data(), places=2, stop_after=5, run_dir="stopped", **settings)
    folder = Path(stopped.path).resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = meristem.resume(folder, search=InFolder(tmp_path))
    assert [resumed.weights(member).read_bytes() for member in range(4)] == all_weights
    assert meristem.replay(resumed, 3).weights(0).read_bytes() == all_weights[3]
    assert run.summary["places"] == {"count": 2, "busy": 1}


class InFolder(Data):
    """Gives paths in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def suggest(self, member):
        settings = super().suggest(member)
        return {key: self.folder / value if key == "init" else value for key, value in settings.items()}


def test_a_search_is_resumed_to_the_same_bits():
    whole = meristem.sweep(search=Rates(), samples=6, places=2, **SETTINGS)
    stopped = meristem.sweep(search=Rates(), samples=6, places=2, stop_after=5, **SETTINGS, run_dir="stopped")
    assert len(stopped.leaderboard) < 6
    with pytest.raises(SettingError, match="sampler"):
        meristem.resume("stopped")
    search = Rates()
    resumed = meristem.resume("stopped", search=search)
    assert ("suggest", 0) not in search.calls
    assert resumed.leaderboard == whole.leaderboard
    for env in range(6):
        assert resumed.weights(env).read_bytes() == whole.weights(env).read_bytes()


def test_a_searcher_may_end_drawn_members():
    search = Rates()
    run = meristem.sweep({"lr": {"log_uniform": [1e-3, 1]}}, search=search, samples=3, **SETTINGS)
    assert [call for call in search.calls if call[0] == "suggest"] == []
    assert {place["number"]: place["steps"] for place in run.leaderboard} == {0: 4, 1: 4, 2: 2}


def test_errors_of_a_searcher_end_the_run_and_are_raised():
    class Broken(Rates):
        def report(self, member, steps, score):
            raise KeyError("no study")

    with pytest.raises(KeyError, match="no study"):
        meristem.sweep(search=Broken(), samples=3, **SETTINGS)
    for wrong in ({"steps": 4}, {"lrr": 1}, {"lr": "fast"}, {"lr": -1}, {"controller": "ppo"}, 3):
        search = Rates()
        search.suggest = lambda member, wrong=wrong: wrong
        with pytest.raises((MeristemError, TypeError)):
            meristem.sweep(search=search, samples=3, **SETTINGS)
    with pytest.raises(SettingError, match="1 round"):
        meristem.sweep({"lr": {"choice": [0.1, 0.2]}}, search=Rates(), samples=3, rounds=2, **SETTINGS)
    with pytest.raises(SettingError, match="members to search over"):
        meristem.train(search=Rates(), controller="none", **SETTINGS)
    with pytest.raises(MeristemError, match="Searcher"):
        meristem.sweep(search=print, samples=3, **SETTINGS)


def test_a_suggestion_is_checked_as_a_member_that_is_given():
    for wrong, words in [
        ({"train_share": 1e-5}, r"`train-share`: got 0.00001 in member 2"),
        ({"max_parameters": 9}, "got 9 in member 2, .* the host's parameters"),
        ({"host": "nohost"}, "member 2: unknown host `nohost`"),
        ({"init": "missing.safetensors"}, "missing.safetensors .* in member 2"),
        ({"lr": "fast"}, "lr=fast in member 2"),
    ]:
        search, steps = Rates(), []
        search.suggest = lambda member, wrong=wrong: wrong if member == 2 else {}
        with pytest.raises(SettingError, match=words):
            meristem.sweep(search=search, samples=3, on_event=lambda event: steps.append(event["event"]), **SETTINGS)
        assert "step_completed" not in steps, "found before anything is trained"


SCRIPT = '{"step": 1, "op": "GERMINATE", "slot": "c0", "blueprint": "norm", "then": "FOSSILIZE"}'
GROWING = {
    **SETTINGS, "host": "conv1d:4,8", "controller": "random", "control_split": 0.2, "birth": "joint",
    "min_training_steps": 1, "steps": 5, "checkpoint_every": 1,
}


class Files(meristem.Searcher):
    """Chooses a script for member 0, and initial weights for member 2."""

    def suggest(self, member):
        return [{"controller": "fixed:s.jsonl"}, {}, {"init": "w.safetensors"}][member]


def test_files_that_a_searcher_names_belong_to_the_run(tmp_path):
    script, weights = tmp_path / "s.jsonl", tmp_path / "w.safetensors"
    script.write_text(SCRIPT)
    first = meristem.train(**{**GROWING, "controller": "none", "steps": 1, "envs": 1})
    weights.write_bytes(first.weights(0).read_bytes())
    settings = {**GROWING, "samples": 3, "places": 2}
    whole = meristem.sweep(search=Files(), **settings)
    named = {Path(file["path"]).name for file in whole.summary["input_files"]}
    assert named == {"s.jsonl", "w.safetensors"}
    for stop, file in [(3, script), (7, script)]:
        stopped = meristem.sweep(search=Files(), stop_after=stop, **settings)
        kept = file.read_bytes()
        file.write_text(SCRIPT.replace("c0", "c1"))
        with pytest.raises(MeristemError, match=f"the contents of .*{file.name}"):
            meristem.resume(stopped, search=Files())
        file.write_bytes(kept)
        resumed = meristem.resume(stopped, search=Files())
        for env in range(3):
            assert resumed.weights(env).read_bytes() == whole.weights(env).read_bytes(), (stop, env)


def settings_of(trial):
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1, log=True),
        "momentum": trial.suggest_float("momentum", 0, 0.95),
        "host": trial.suggest_categorical("host", ["mlp:8", "mlp:4,4"]),
    }


def a_study(**options):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        **options,
    )


def test_trials_are_members_of_one_fleet():
    study = a_study()
    import meristem.optuna

    run = meristem.optuna.optimize(study, settings_of, n_trials=24, n_jobs=4, **SETTINGS)
    states = [trial.state.name for trial in study.trials]
    assert states.count("COMPLETE") + states.count("PRUNED") == 24 and "PRUNED" in states, states
    for trial in study.trials:
        assert trial.user_attrs["meristem_member"] == trial.number
        [place] = [place for place in run.leaderboard if place["number"] == trial.number]
        assert f"momentum={trial.params['momentum']}" in place["member"]
        assert place["steps"] == len(trial.intermediate_values)
        assert abs(place["control"]["mean"] - trial.value) < 1e-9
    again = a_study()
    meristem.optuna.optimize(again, settings_of, n_trials=24, n_jobs=4, **SETTINGS)
    assert [trial.params for trial in again.trials] == [trial.params for trial in study.trials]
    with pytest.raises(SettingError, match="maximises"):
        optuna = pytest.importorskip("optuna")
        meristem.optuna.optimize(optuna.create_study(), settings_of, n_trials=2, **SETTINGS)


def test_a_study_is_resumed():
    study = a_study()
    import meristem.optuna

    stopped = meristem.optuna.optimize(
        study, settings_of, n_trials=12, n_jobs=3, stop_after=3, **SETTINGS, run_dir="stopped"
    )
    before = {trial.number: trial.params for trial in study.trials}
    done = meristem.optuna.optimize(study, settings_of, resume=stopped)
    assert len(study.trials) == 12 and len(done.leaderboard) == 12
    assert all(trial.state.is_finished() for trial in study.trials)
    assert all(study.trials[number].params == params for number, params in before.items())


def test_the_example_with_optuna_prunes_trials():
    pytest.importorskip("optuna")
    example = Path(__file__).parents[1] / "examples" / "optuna_pruning.py"
    command = [sys.executable, str(example), "--trials", "16", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    trials, best = done.stdout.splitlines()[-2:]
    complete, pruned = int(trials.split()[0]), int(trials.split()[3])
    assert complete + pruned == 16 and pruned > 0, trials
    assert "lr" in best, best
