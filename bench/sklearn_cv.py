"""Ten-fold cross-validation as one fleet beside scikit-learn's, and bagging of 32 members.

    PYTHONPATH=FOLDER python bench/sklearn_cv.py [--rounds 5] [--json FILE]

Needs meristem and scikit-learn. Tables: three that come with scikit-learn. Both programs train two
hidden layers of 64 for 100 epochs of batches of 32 by stochastic gradient descent, with equal folds,
rates, momentum and weight decay, in float32, on features that are standardised by the training
samples of the fold. They take turns; each round has another seed. The first round is not counted.
"""

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from sklearn import datasets, model_selection
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

import meristem
from meristem.sklearn import MeristemClassifier, MeristemRegressor, cross_validate

EPOCHS, BATCH, RATE, MOMENTUM, DECAY = 100, 32, 0.01, 0.9, 5e-4
FOLDS, MEMBERS, BINS = 10, 32, 15
CLASSES = {"breast_cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}
NUMBERS = {"diabetes": datasets.load_diabetes}


def ours(is_numbers: bool, seed: int, **parameters: Any) -> Any:
    """Our estimator. Its loss of numbers is the squared difference, theirs half of that."""
    kind = MeristemRegressor if is_numbers else MeristemClassifier
    rate = RATE / 2 if is_numbers else RATE
    return kind(
        "mlp:64,64", steps=EPOCHS, batch=BATCH, lr=rate, momentum=MOMENTUM, weight_decay=DECAY,
        clip_norm="off", random_state=seed, **parameters,
    )


def theirs(is_numbers: bool, seed: int) -> Any:
    """scikit-learn's. Its penalty is divided by the samples of a batch."""
    kind = MLPRegressor if is_numbers else MLPClassifier
    network = kind(
        hidden_layer_sizes=(64, 64), solver="sgd", alpha=DECAY * BATCH, batch_size=BATCH,
        learning_rate_init=RATE, max_iter=EPOCHS, momentum=MOMENTUM, nesterovs_momentum=False, tol=0.0,
        n_iter_no_change=EPOCHS + 1, random_state=seed,
    )
    pipe = make_pipeline(StandardScaler(), network)
    return TransformedTargetRegressor(pipe, transformer=StandardScaler()) if is_numbers else pipe


def ways(is_numbers: bool, seed: int) -> dict[str, Callable[[Any, Any, Any], dict[str, Any]]]:
    """The ways to cross-validate, by name."""
    sequential = model_selection.cross_validate
    return {
        "one fleet": lambda x, y, cv: cross_validate(ours(is_numbers, seed), x, y, cv=cv),
        "ours, fold after fold": lambda x, y, cv: sequential(ours(is_numbers, seed), x, y, cv=cv),
        "MLP, n_jobs=1": lambda x, y, cv: sequential(theirs(is_numbers, seed), x, y, cv=cv),
        "MLP, one thread": threadpool_limits.wrap(limits=1)(
            lambda x, y, cv: sequential(theirs(is_numbers, seed), x, y, cv=cv)
        ),
        "MLP, n_jobs=2": lambda x, y, cv: sequential(theirs(is_numbers, seed), x, y, cv=cv, n_jobs=2),
    }


def validate(rounds: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Seconds, processor time, and the mean score of the folds, of each way in each round.

    Processor time is the sum over all threads of this process; the workers of `n_jobs=2` are not in it.
    """
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for table, load in {**CLASSES, **NUMBERS}.items():
        is_numbers = table in NUMBERS
        x, y = load(return_X_y=True)
        splitter = model_selection.KFold if is_numbers else model_selection.StratifiedKFold
        of_table = found.setdefault(table, {})
        for seed in range(rounds + 1):
            cv = splitter(FOLDS, shuffle=True, random_state=seed)
            for name, way in ways(is_numbers, seed).items():
                start, start_cpu = time.perf_counter(), time.process_time()
                scores = way(x.astype(np.float32), y, cv)["test_score"]
                seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
                if seed > 0:
                    of_way = of_table.setdefault(name, {"seconds": [], "cpu_seconds": [], "score": []})
                    of_way["seconds"].append(seconds)
                    of_way["cpu_seconds"].append(cpu_seconds)
                    of_way["score"].append(float(np.mean(scores)))
    return found


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error of Guo et al. 2017 (arXiv 1706.04599, equation 3).

    The sum over bins of |B| / n · |accuracy(B) - confidence(B)|, for equal bins of the confidence,
    which is the largest probability.
    """
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(right[bins == b].sum() - confidence[bins == b].sum()) for b in range(BINS)]
    return float(sum(gaps) / len(labels))


def bag(seeds: int) -> dict[str, list[dict[str, float]]]:
    """Test accuracy and calibration error of 32 bagged members: their mean, and single ones."""
    found: dict[str, list[dict[str, float]]] = {}
    for table, load in CLASSES.items():
        x, y = load(return_X_y=True)
        for seed in range(seeds):
            train, test, y_train, y_test = model_selection.train_test_split(
                x, y, test_size=0.5, stratify=y, random_state=seed
            )
            start = time.perf_counter()
            fitted = ours(False, seed, n_members=MEMBERS, bootstrap=True).fit(train, y_train)
            seconds = time.perf_counter() - start
            each = fitted.member_probabilities(test)
            accuracies = [float((p.argmax(axis=1) == y_test).mean()) for p in each]
            errors = [calibration_error(p, y_test) for p in each]
            best = int(np.argmax(accuracies))
            mean = each.mean(axis=0)
            whole = ours(False, seed).fit(train, y_train).predict_proba(test)
            found.setdefault(table, []).append({
                "seconds": seconds,
                "accuracy of the mean of probabilities": float((mean.argmax(axis=1) == y_test).mean()),
                "accuracy of the best member": accuracies[best],
                "mean accuracy of the members": statistics.mean(accuracies),
                "accuracy of one network of all samples": float((whole.argmax(axis=1) == y_test).mean()),
                "calibration error of the mean of probabilities": calibration_error(mean, y_test),
                "calibration error of the best member": errors[best],
                "mean calibration error of the members": statistics.mean(errors),
                "calibration error of one network of all samples": calibration_error(whole, y_test),
            })
    return found


def spread(values: list[float], digits: int) -> str:
    """Median, least and largest."""
    numbers = (statistics.median(values), min(values), max(values))
    return "{} ({} to {})".format(*(f"{number:.{digits}f}" for number in numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=ConvergenceWarning)
    load = [os.getloadavg()[0]]
    validation = validate(given.rounds)
    load.append(os.getloadavg()[0])
    bagging = bag(given.rounds)
    about = {
        "versions": {"meristem": meristem.__version__, "sklearn": sklearn.__version__, "numpy": np.__version__},
        "python": platform.python_version(), "cores": os.cpu_count(), "load": load,
    }
    print(about)
    for table, of_table in validation.items():
        for name, of_way in of_table.items():
            print(f"| {table} | {name} | {spread(of_way['seconds'], 2)} | {spread(of_way['cpu_seconds'], 2)} | {spread(of_way['score'], 4)} |")
    for table, seeds in bagging.items():
        for name in seeds[0]:
            print(f"| {table} | {name} | {spread([found[name] for found in seeds], 4)} |")
    if given.json:
        result = {**about, "cross_validation": validation, "bagging": bagging}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
