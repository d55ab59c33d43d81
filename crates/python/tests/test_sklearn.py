"""Estimators for scikit-learn, and cross-validation as one fleet (P7)."""

import multiprocessing
import pickle
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
import pytest

import meristem
from meristem import errors

pytest.importorskip("sklearn", minversion="1.6")

from sklearn import model_selection
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_classification
from sklearn.feature_selection import VarianceThreshold
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from meristem.sklearn import MeristemClassifier, MeristemRegressor, cross_validate

X, Y = load_iris(return_X_y=True)
QUICK = {"host": "mlp:8", "steps": 8, "lr": 0.05, "threads": 1, "random_state": 5}
FOLDS = model_selection.StratifiedKFold(3, shuffle=True, random_state=2)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder in which this process makes temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def tensors(estimator, member=0):
    return estimator.members_[member].tensors


def same(a, b):
    """Whether two members have the same bits."""
    return list(a) == list(b) and all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("estimator", [MeristemClassifier(threads=1), MeristemRegressor(threads=1)])
def test_every_check_of_scikit_learn_passes(estimator):
    check_estimator(estimator, on_skip=None)


def test_the_mean_of_probabilities_predicts():
    many = MeristemClassifier(**QUICK, n_members=3, bootstrap=True).fit(X, Y)
    each = many.member_probabilities(X)
    assert each.shape == (3, len(X), 3) and not np.array_equal(each[0], each[1])
    assert np.allclose(each.sum(axis=2), 1)
    assert np.array_equal(many.predict_proba(X), each.mean(axis=0))
    assert np.array_equal(many.predict(X), each.mean(axis=0).argmax(axis=1))
    assert many.loss_curves_.shape == (3, 8) and (many.loss_curves_[:, -1] < many.loss_curves_[:, 0]).all()
    names = np.array(["c", "a", "b"], dtype=object)
    assert set(MeristemClassifier(**QUICK).fit(X, names[Y]).predict(X)) <= set(names)


def test_numbers_have_the_units_and_the_form_of_the_targets():
    x, y = load_diabetes(return_X_y=True)
    one = MeristemRegressor(**QUICK).fit(x, y)
    assert one.predict(x).shape == y.shape and one.score(x, y) > 0.4
    assert one.predict(x).mean() == pytest.approx(y.mean(), rel=0.1)
    two = MeristemRegressor(**QUICK, n_members=2).fit(x, np.column_stack([y, -1000 * y]))
    assert two.predict(x).shape == (len(y), 2) and two.score(x, np.column_stack([y, -1000 * y])) > 0.4
    assert np.array_equal(two.predict(x), two.member_predictions(x).mean(axis=0))


def test_the_same_seed_gives_the_same_bits_with_any_number_of_threads():
    one, other = (MeristemClassifier(**{**QUICK, "threads": t}, n_members=2).fit(X, Y) for t in (1, 3))
    assert same(tensors(one, 1), tensors(other, 1)) and not same(tensors(one, 0), tensors(one, 1))
    assert not same(tensors(one), tensors(clone(one).set_params(random_state=6).fit(X, Y)))


def test_numpy_predicts_as_the_engine_does(tmp_path):
    fitted = MeristemClassifier(**QUICK).fit(X, Y)
    learners = meristem.Learners(input=4, outputs=3, envs=1, batch=len(X), host="mlp:8")
    learners.load(fitted.members_[0])
    engine = learners.eval(fitted.scaler_.transform(X).astype(np.float32)[None])[0]
    powers = np.exp(engine.astype(float))
    # A logit is a sum of 8 products in f32 of numbers below 10: an error below 8 · 100 · 2^-24.
    assert np.abs(powers / powers.sum(axis=1, keepdims=True) - fitted.predict_proba(X)).max() < 5e-5


def test_a_fitted_estimator_pickles_and_predicts_in_a_forked_process():
    fitted = MeristemClassifier(**QUICK).fit(X, Y)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict_proba(X), fitted.predict_proba(X))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert np.array_equal(pool.apply_async(fitted.predict, (X,)).get(timeout=60), fitted.predict(X))


def test_searches_and_pipelines_work():
    pipe = make_pipeline(SimpleImputer(), MeristemClassifier(**QUICK))
    gaps = X.copy()
    gaps[::9, 1] = np.nan
    grid = {"meristemclassifier__lr": [1e-6, 0.05]}
    search = model_selection.GridSearchCV(pipe, grid, cv=FOLDS).fit(gaps, Y)
    assert search.best_params_ == {"meristemclassifier__lr": 0.05} and search.best_score_ > 0.8


def test_no_files_and_no_samples_remain(scratch):
    meristem.clear_cache()
    kept = meristem.Dataset("blobs")
    MeristemClassifier(**QUICK).fit(X, Y)
    cross_validate(MeristemClassifier(**QUICK), X, Y, cv=FOLDS)
    with pytest.raises(errors.SettingError):
        MeristemClassifier(**{**QUICK, "host": "mlp:none"}).fit(X, Y)
    assert not list(scratch.iterdir())
    # The process keeps the dataset of the program, and nothing else.
    assert meristem.clear_cache() == 1 and len(kept) > 0


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"steps": 0}, "`steps`: got 0"),
        ({"n_members": 0}, "`n_members`: got 0, expected 1 to 4096"),
        ({"n_members": True}, "`n_members`"),
        ({"bootstrap": 1}, "`bootstrap`: got 1"),
        ({"settings": {"steps": 3}}, "give `steps=`"),
        ({"settings": {"seed": 3}}, "`settings`: got 'seed'"),
        ({"settings": ["seed"]}, "a mapping"),
        ({"settings": {"no_setting": 1}}, "no_setting"),
        ({"controller": "nobody"}, "nobody"),
    ],
)
def test_a_wrong_parameter_is_named(parameters, words):
    with pytest.raises(errors.SettingError, match=words) as raised:
        MeristemClassifier(**{**QUICK, **parameters}).fit(X, Y)
    assert isinstance(raised.value, ValueError)


def test_samples_that_cannot_be_learned_are_named():
    with pytest.raises(ValueError, match="1 class.*at least 2 classes"):
        MeristemClassifier(**QUICK).fit(X, np.zeros(len(X), int))
    with pytest.raises(ValueError, match="range of float32"):
        MeristemClassifier(**QUICK, standardize=False).fit(X * 1e300, Y)
    with pytest.raises(ValueError, match="NaN"):
        MeristemRegressor(**QUICK).fit(np.where(X > 5, np.nan, X), Y)


def test_the_settings_of_a_run_reach_it():
    smooth = MeristemClassifier(**QUICK, settings={"label_smoothing": 0.9}).fit(X, Y)
    plain = MeristemClassifier(**QUICK).fit(X, Y)
    assert smooth.predict_proba(X).max() < plain.predict_proba(X).max()


def test_members_grow():
    def grow(env):
        for slot in env.slots:
            if "GERMINATE" in slot.ops:
                return {"op": "GERMINATE", "slot": slot.slot, "blueprint": slot.blueprints[0]}
            if slot.gate_passes and "ADVANCE" in slot.ops:
                return {"op": "ADVANCE", "slot": slot.slot}

    bare = MeristemClassifier(**QUICK).fit(X, Y)
    grown = MeristemClassifier(**QUICK, controller=grow).fit(X, Y)
    assert grown.parameters_[0] > bare.parameters_[0]
    assert np.allclose(grown.predict_proba(X).sum(axis=1), 1)
    found = cross_validate(grown, X, Y, cv=FOLDS, return_estimator=True)
    assert all(one.parameters_[0] > bare.parameters_[0] for one in found["estimator"])


def test_a_fold_has_the_bits_of_a_member_that_is_trained_on_it_alone():
    """Network m of fold k is env 3 m + k of the fleet, and so is member 3 m + k of an estimator."""
    classifier = MeristemClassifier(**QUICK, n_members=2)
    found = cross_validate(
        classifier, X, Y, cv=FOLDS, return_estimator=True, return_indices=True, return_train_score=True
    )
    theirs = model_selection.cross_validate(
        classifier, X, Y, cv=FOLDS, return_estimator=True, return_indices=True, return_train_score=True
    )
    assert set(found) == set(theirs)
    for k, (train, test) in enumerate(FOLDS.split(X, Y)):
        for name, indices in (("train", train), ("test", test)):
            assert np.array_equal(found["indices"][name][k], indices)
            assert found[f"{name}_score"][k] == found["estimator"][k].score(X[indices], Y[indices])
        alone = clone(classifier).set_params(n_members=k + 4).fit(X[train], Y[train])
        for m in range(2):
            assert same(tensors(alone, 3 * m + k), tensors(found["estimator"][k], m))
    assert same(tensors(theirs["estimator"][0]), tensors(found["estimator"][0]))
    assert found["test_score"].min() > 0.8


def test_a_control_split_is_not_trained_on():
    """Ten samples are left, of which less is learned than of a hundred."""
    few = cross_validate(MeristemClassifier(**QUICK, control_split=0.9), X, Y, cv=FOLDS, return_estimator=True)
    all_of_them = cross_validate(MeristemClassifier(**QUICK), X, Y, cv=FOLDS, return_estimator=True)
    for one, other in zip(few["estimator"], all_of_them["estimator"], strict=True):
        assert one.score(X, Y) < other.score(X, Y)


def test_members_and_metrics_and_any_splitter():
    pytest.importorskip("pandas")
    x, y = load_diabetes(return_X_y=True, as_frame=True)
    splits = model_selection.ShuffleSplit(4, test_size=0.2, train_size=0.5, random_state=1)
    found = cross_validate(
        MeristemRegressor(**QUICK, n_members=2, bootstrap=True),
        x, y, cv=splits, scoring=["r2", "neg_mean_absolute_error"], return_estimator=True,
    )
    assert sorted(found) == ["estimator", "fit_time", "score_time", "test_neg_mean_absolute_error", "test_r2"]
    assert found["test_r2"].shape == (4,) and found["test_r2"].min() > 0.2
    assert [len(one.members_) for one in found["estimator"]] == [2] * 4
    assert list(found["estimator"][0].feature_names_in_) == list(x.columns)
    one = model_selection.ShuffleSplit(1, test_size=0.2, random_state=1)
    assert cross_validate(MeristemRegressor(**QUICK), x, y, cv=one)["test_score"].shape == (1,)


def test_steps_before_the_network_are_fitted_for_each_fold():
    gaps = X.copy()
    gaps[::9, 1] = np.nan
    pipe = make_pipeline(SimpleImputer(), MeristemClassifier(**QUICK))
    found = cross_validate(pipe, gaps, Y, cv=FOLDS, return_estimator=True)
    for one, (train, _) in zip(found["estimator"], FOLDS.split(gaps, Y), strict=True):
        assert one[0].statistics_[1] == pytest.approx(np.nanmean(gaps[train, 1]), rel=1e-12)
    theirs = model_selection.cross_validate(pipe, gaps, Y, cv=FOLDS)
    assert found["test_score"][0] == theirs["test_score"][0]

    rare = np.zeros((len(X), 5))
    rare[:, :4], rare[0, 4] = X, 1
    with pytest.raises(ValueError, match="4 to 5 features"):
        cross_validate(make_pipeline(VarianceThreshold(), MeristemClassifier(**QUICK)), rare, Y, cv=FOLDS)
    with pytest.raises(errors.SettingError, match="MeristemClassifier or MeristemRegressor"):
        cross_validate(make_pipeline(SimpleImputer()), X, Y)


def test_a_fold_without_a_class_is_scored():
    x, y = make_classification(60, 4, n_informative=3, n_redundant=0, n_classes=2, random_state=0)
    y[:20] = 2
    found = cross_validate(MeristemClassifier(**QUICK), x, y, cv=model_selection.KFold(3), return_estimator=True)
    assert found["test_score"][0] == 0 and list(found["estimator"][0].classes_) == [0, 1, 2]


def test_the_package_needs_no_scikit_learn():
    script = """
        import sys
        sys.modules["sklearn"] = None
        import meristem
        try:
            import meristem.sklearn
        except ImportError as error:
            assert "pip install 'scikit-learn" in str(error), error
        else:
            raise AssertionError("imported")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
