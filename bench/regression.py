"""R² of networks for numbers, beside scikit-learn's MLPRegressor with the same layers.

    python bench/regression.py target/release/meristem [--seeds 5] [--json FILE]

Needs numpy and scikit-learn. Two tables: `friedman`, as the program generates it, and the same with
two categories that shift the target and with missing values, as a CSV file that both read. Both
train with stochastic gradient descent for the same number of epochs, with equal batches, momentum
and weight decay, on 90 % of the training rows. The rest chooses one of four learning rates; the test
rows are used once. Beside it: MLPRegressor as it comes, with Adam.
"""

import argparse
import csv
import json
import statistics
import subprocess
import tempfile
import warnings
from pathlib import Path

import numpy as np
import sklearn
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import ConvergenceWarning
from sklearn.impute import SimpleImputer
from sklearn.metrics import r2_score
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

EPOCHS, BATCH, MOMENTUM, DECAY = 60, 32, 0.9, 1e-4
LAYERS = (64, 64)
RATES = [0.001, 0.003, 0.01, 0.03]
CATEGORIES = {"north": 4.0, "south": -4.0, "west": 0.0}


def tables(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Friedman #1 (1991): features and targets."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(rows, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y + rng.normal(size=rows)


def write(path: Path, mixed: bool) -> None:
    """Writes 4,000 training and 1,000 test rows; mixed ones have a category and missing values."""
    x, y = tables(5000, 7)
    rng = np.random.default_rng(8)
    names = list(CATEGORIES)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([f"x{i}" for i in range(10)] + (["region"] if mixed else []) + ["y", "split"])
        for i, (row, target) in enumerate(zip(x, y, strict=True)):
            cells = [f"{value:.9g}" for value in row]
            if mixed:
                region = names[rng.integers(3)]
                target += CATEGORIES[region]
                cells = ["" if rng.uniform() < 0.05 else cell for cell in cells]
                cells.append("" if rng.uniform() < 0.05 else region)
            out.writerow([*cells, f"{target:.9g}", "train" if i < 4000 else "test"])


def read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features as objects, targets, and whether a row is for training."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    features = [name for name in rows[0] if name not in ("y", "split")]
    cell = lambda row, name: row[name] if name == "region" else float(row[name] or "nan")  # noqa: E731
    x = np.array([[cell(row, name) for name in features] for row in rows], dtype=object)
    y = np.array([float(row["y"]) for row in rows])
    return x, y, np.array([row["split"] == "train" for row in rows])


def prepared(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """The rules of `--missing fill`, fitted to the training rows, by scikit-learn."""
    numeric = make_pipeline(SimpleImputer(strategy="mean"), StandardScaler())
    category = make_pipeline(OneHotEncoder(sparse_output=False), StandardScaler())
    steps = [("numbers", numeric, list(range(10)))]
    if x.shape[1] > 10:
        steps.append(("region", category, [10]))
    return ColumnTransformer(steps).fit(x[train]).transform(x).astype(np.float64)


def ours(meristem: Path, path: Path, rate: float, seed: int, folder: Path) -> tuple[float, float]:
    """Control and test R²."""
    layers = ",".join(map(str, LAYERS))
    words = f"""train --dataset table --data-root {path} --target y --missing fill --host mlp:{layers} --envs 1
        --steps {EPOCHS} --batch {BATCH} --lr {rate} --momentum {MOMENTUM} --weight-decay {DECAY} --clip-norm off
        --control-split 0.1 --controller none --seed {seed} --quiet --run-dir {folder}"""
    subprocess.run([meristem, *words.split()], check=True, capture_output=True)
    [env] = json.loads((folder / "summary.json").read_text())["envs"]
    return env["control_r2"], env["test_r2"]


def theirs(path: Path, rate: float | None, seed: int) -> tuple[float, float]:
    """R² on held out training rows and on test rows."""
    x, y, train = read(path)
    rng = np.random.default_rng(seed)
    held = np.zeros(len(y), bool)
    held[rng.choice(np.flatnonzero(train), train.sum() // 10, replace=False)] = True
    x, used = prepared(x, train), train & ~held
    mean, std = y[train].mean(), y[train].std()
    # Its loss is half the squared difference, so its rate is twice ours.
    sgd = {} if rate is None else dict(
        solver="sgd", learning_rate_init=2 * rate, momentum=MOMENTUM, nesterovs_momentum=False,
        alpha=DECAY * BATCH)
    model = MLPRegressor(hidden_layer_sizes=LAYERS, batch_size=BATCH, max_iter=EPOCHS, tol=0, n_iter_no_change=EPOCHS,
                         random_state=seed, **sgd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x[used], (y[used] - mean) / std)
    score = lambda rows: float(r2_score((y[rows] - mean) / std, model.predict(x[rows])))  # noqa: E731
    return score(held), score(~train)


def chosen(results: dict[float | None, list[tuple[float, float]]]) -> tuple[float | None, list[float]]:
    """The rate with the best mean on held out rows, and its test scores."""
    rate = max(results, key=lambda rate: statistics.mean(held for held, _ in results[rate]))
    return rate, [test for _, test in results[rate]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    program, report = args.program.resolve(), {"scikit-learn": sklearn.__version__}
    with tempfile.TemporaryDirectory() as scratch:
        for name, mixed in (("friedman", False), ("mixed", True)):
            path = Path(scratch) / f"{name}.csv"
            write(path, mixed)
            seeds = range(args.seeds)
            folder = lambda rate, seed: Path(scratch) / f"{name}-{rate}-{seed}"  # noqa: E731
            compared = {
                "meristem": {r: [ours(program, path, r, s, folder(r, s)) for s in seeds] for r in RATES},
                "MLPRegressor, sgd": {r: [theirs(path, r, s) for s in seeds] for r in RATES},
                "MLPRegressor, adam": {None: [theirs(path, None, s) for s in seeds]},
            }
            for who, results in compared.items():
                rate, tests = chosen(results)
                low, high = min(tests), max(tests)
                print(f"{name}: {who:19} rate {rate}  test R² {statistics.mean(tests):.4f} ({low:.4f} to {high:.4f})")
                report[f"{name}: {who}"] = {"rate": rate, "test_r2": tests}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
