"""Checks the files of `meristem export` and `train --tensorboard` with onnxruntime and TensorBoard.

    python .ci/check_exports.py MERISTEM

Needs numpy, onnxruntime and tensorboard. Trains small runs in which every blueprint grows, with every
style of blending, in two slots, and compares the logits of their ONNX models with `eval --logits`;
then reads the event files of whole, killed and resumed runs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BLUEPRINTS = "norm attention depthwise bottleneck conv_small conv_light conv_heavy".split()
STYLES = ["linear_add", "linear_multiply", "sigmoid_add", "linear_gate"]
# Relative to the largest logit, at least 1: sums of some hundred products, in another order.
TOLERANCE = 1e-5
EVERYTHING = {"scalars": 0, "histograms": 0, "tensors": 0}

meristem = Path(sys.argv[1]).resolve()


#: Layers of a described host: branches, groups, biases, strides and windows that are not square.
BRANCHES = [
    {"conv2d": {"out": 8, "kernel": [3, 5], "stride": [1, 2], "bias": True}}, "batch_norm", "relu",
    {"residual": {"body": [{"slot": {"name": "r0c0"}}, {"conv2d": {"out": 12, "kernel": 3, "groups": 4}},
                           {"group_norm": {"groups": 3}}, "tanh", "layer_norm"],
                  "shortcut": [{"conv2d": {"out": 12, "kernel": 1}}]}},
    {"branches": {"join": "add", "branches": [[], ["sigmoid"], [{"slot": {"name": "r0c1"}}]]}},
    {"max_pool2d": {"kernel": 3, "stride": 2, "padding": 1}}, {"save": {"name": "pooled"}},
    {"conv2d": {"out": 12, "kernel": 3, "dilation": 2}}, {"join": {"join": "multiply", "from": ["pooled"]}},
    {"branches": {"join": "multiply", "branches": [[], ["global_avg_pool", {"linear": {"out": 4}}, "relu",
        {"conv2d": {"out": 12, "kernel": 1, "bias": True}}, "sigmoid"]]}}, {"save": {"name": "scaled"}},
    {"load": {"name": "pooled"}}, "tanh", {"join": {"join": "add", "from": ["scaled"]}},
    {"avg_pool2d": {"kernel": [2, 1], "stride": 2}},
    {"branches": {"join": "concat", "branches": [["global_max_pool"], ["global_avg_pool"], ["flatten"]]}},
    {"linear": {"out": 16, "bias": False}}, "relu", "elu", "rms_norm", {"linear": {"out": 16}}, "gelu", "silu",
    {"leaky_relu": {"slope": 0.2}}, "gelu_tanh", {"linear": {"out": 16}}, "softplus", "hard_swish",
    {"dropout": {"p": 0.3}},
    {"linear": {"out": "classes"}},
]


def run(*arguments, code=0):
    words = [str(word) for argument in arguments for word in str(argument).split()]
    done = subprocess.run([meristem, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def script(path: Path, stop: int) -> None:
    """Env e grows blueprint e, which becomes permanent, then another one. Actions before step `stop`."""
    lines = []
    for env in range(len(BLUEPRINTS)):
        first = {"slot": "r0c0", "blueprint": BLUEPRINTS[env], "style": STYLES[env % 4]}
        second = {"slot": "r0c1", "blueprint": BLUEPRINTS[(env + 3) % 7], "style": STYLES[(env + 1) % 4]}
        actions = {
            0: {"op": "GERMINATE", **first, "tempo": "fast", "alpha_target": "0.7"},
            1: {"op": "ADVANCE", "slot": "r0c0"},
            3: {"op": "ADVANCE", "slot": "r0c0"},
            4: {"op": "GERMINATE", **second, "tempo": "fast"},
            5: {"op": "ADVANCE", "slot": "r0c1"},
            7: {"op": "ADVANCE", "slot": "r0c1"},
            8: {"op": "ADVANCE", "slot": "r0c0"},
            9: {"op": "FOSSILIZE", "slot": "r0c0"},
        }
        lines += [json.dumps({"step": at, "env": env, **a}) for at, a in actions.items() if at < stop]
    path.write_text("\n".join(lines) + "\n")


def dataset(path: Path, channels: int) -> np.ndarray:
    """Writes random images; returns the test images."""
    rng = np.random.default_rng(channels)
    images = rng.integers(0, 256, (384, 16, 20, channels), np.uint8)
    labels = rng.integers(0, 5, 384)
    np.savez(path, train_images=images[:288], train_labels=labels[:288],
             test_images=images[288:], test_labels=labels[288:])
    return images[288:]


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def check_model(weights: Path, data: str, images: np.ndarray) -> float:
    """Returns the largest relative error of the two models of a weights file."""
    plain, whole = weights.with_suffix(".onnx"), weights.with_suffix(".u8.onnx")
    run(f"export onnx {weights} --out {plain}")
    run(f"export onnx {weights} --out {whole} --with-preprocessing")
    logits = weights.with_suffix(".npy")
    run(f"eval --weights {weights} {data} --split test --logits {logits}")
    expected = np.load(logits)
    assert expected.shape == (len(images), 5) and expected.dtype == np.float32
    model = session(plain)
    metadata = model.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == [str(label) for label in range(5)], metadata
    constants = json.loads(metadata["normalization"])
    mean, std = (np.array(constants[key], np.float32) for key in ("mean", "std"))
    normalised = ((images / np.float32(255) - mean) / std).astype(np.float32).transpose(0, 3, 1, 2)
    takes = model.get_inputs()[0]
    assert (takes.name, takes.type) == ("images", "tensor(float)"), takes
    assert takes.shape == ["N", images.shape[3], 16, 20], takes.shape
    scale, largest = max(1.0, float(np.abs(expected).max())), 0.0
    for chosen, given in ((model, normalised), (session(whole), images)):
        # A batch of any size.
        for part in (slice(None), slice(0, 1), slice(3, 10)):
            got = chosen.run(["logits"], {"images": given[part]})[0]
            error = float(np.abs(got - expected[part]).max()) / scale
            assert error < TOLERANCE, f"{weights}: {error}"
            largest = max(largest, error)
    return largest


def check_onnx(scratch: Path) -> None:
    base = "--min-training-steps 1 --min-contribution -100 --batch 32 --max-batches 2 --rounds 1"
    (scratch / "branches.json").write_text(json.dumps({"layers": BRANCHES}))
    for channels, host, stop in ((3, "cnn:channels=4,blocks=3,kernel=3,pools=2", 20),
                                 (3, f"{scratch}/branches.json", 20),
                                 (1, "cnn:channels=8,blocks=2,kernel=5,pools=1", 8)):
        images = dataset(scratch / f"data{channels}.npz", channels)
        data = f"--dataset arrays --data-root {scratch}/data{channels}.npz"
        steps, folder = {20: 12, 8: 9}[stop], Path(tempfile.mkdtemp(dir=scratch)) / "grown"
        script(scratch / "script.jsonl", stop)
        normalize = "--normalize imagenet" if channels == 3 else ""
        run(f"train {data} --host {host} --envs 7 --steps {steps} {base} --twin off {normalize}",
            f"--controller fixed:{scratch}/script.jsonl --run-dir {folder} --quiet")
        summary = json.loads((folder / "summary.json").read_text())
        stages = [m["stage"] for env in summary["envs"] for m in env["modules"]]
        assert len(stages) == 14, stages
        assert ("fossilized" in stages) == (stop == 20) and "blending" in stages, stages
        errors = [check_model(folder / f"weights/env-{env}.safetensors", data, images) for env in range(7)]
        print(f"{host}: logits differ by {max(errors):.1e} of the largest at most")


#: Layers of a host for signals of two channels.
SIGNALS = [
    {"conv1d": {"out": 6, "kernel": 5, "stride": 2}}, "batch_norm", "relu", {"slot": {"name": "s"}},
    {"max_pool1d": {"kernel": 3, "stride": 1, "padding": 1}}, {"conv2d": {"out": 6, "kernel": [1, 3]}}, "tanh",
    {"conv1d": {"out": 4, "kernel": 2, "padding": 1, "groups": 2, "bias": True}}, {"avg_pool1d": {"kernel": 2}},
    "flatten", {"linear": {"out": "classes"}},
]


def check_inputs(scratch: Path) -> None:
    """Models of vectors and signals, of floats and of bytes, with and without their normalisation."""
    (scratch / "signals.json").write_text(json.dumps({"layers": SIGNALS}))
    rng, labels = np.random.default_rng(0), np.arange(96) % 5
    floats = rng.normal(3, 2, (96, 24)).astype(np.float32)
    for shape, host, kind in (((96, 24), "mlp:16", "vectors"), ((96, 2, 12), f"{scratch}/signals.json", "signals")):
        for x in (floats, (floats * 12 + 99).astype(np.uint8)):
            x = x.reshape(shape)
            path = scratch / f"{kind}-{x.dtype}.npz"
            np.savez(path, train_inputs=x, train_labels=labels, test_inputs=x[::-1], test_labels=labels)
            data, folder = f"--dataset arrays --data-root {path}", path.with_suffix("")
            run(f"train {data} --host {host} --envs 1 --steps 6 --batch 16 --controller random --twin off",
                f"--blueprints standard,vectors --run-dir {folder} --quiet")
            weights = folder / "weights/env-0.safetensors"
            run(f"export onnx {weights} --out {folder}/a.onnx")
            run(f"export onnx {weights} --out {folder}/b.onnx --with-preprocessing")
            run(f"eval --weights {weights} {data} --split train --logits {folder}/logits.npy")
            expected, plain = np.load(folder / "logits.npy"), session(folder / "a.onnx")
            constants = json.loads(plain.get_modelmeta().custom_metadata_map["normalization"])
            mean, std = (np.array(constants[key], np.float32) for key in ("mean", "std"))
            if kind == "signals":
                mean, std = mean[:, None], std[:, None]
            values = x / np.float32(255) if x.dtype == np.uint8 else x
            scale, largest = max(1.0, float(np.abs(expected).max())), 0.0
            for model, given in ((plain, (values - mean) / std), (session(folder / "b.onnx"), x)):
                assert model.get_inputs()[0].shape == ["N", *shape[1:]], model.get_inputs()[0].shape
                got = model.run(["logits"], {"inputs": given})[0]
                largest = max(largest, float(np.abs(got - expected).max()) / scale)
            assert largest < TOLERANCE, largest
            print(f"{kind} of {x.dtype}: logits differ by {largest:.1e} of the largest at most")


def check_numbers(scratch: Path) -> None:
    """The model of a network that learnt numbers has their units."""
    x = np.random.default_rng(1).normal(size=(96, 4)).astype(np.float32)
    y = np.stack([x[:, 0] * 100 - 7, x[:, 1] + x[:, 2]], axis=1)
    np.savez(scratch / "numbers.npz", train_inputs=x, train_targets=y, test_inputs=x, test_targets=y)
    data, folder = f"--dataset arrays --data-root {scratch}/numbers.npz", scratch / "numbers"
    run(f"train {data} --host mlp:16 --envs 1 --steps 6 --batch 16 --controller none --run-dir {folder} --quiet")
    weights = folder / "weights/env-0.safetensors"
    run(f"export onnx {weights} --out {folder}/m.onnx --with-preprocessing")
    run(f"eval --weights {weights} {data} --split train --logits {folder}/outputs.npy")
    model = session(folder / "m.onnx")
    about = json.loads(model.get_modelmeta().custom_metadata_map["outputs"])
    mean, std = (np.array(about["scale"][key]) for key in ("mean", "std"))
    assert about["task"] == "regress" and np.allclose(mean, y.mean(axis=0), rtol=1e-5), about
    got = model.run(["outputs"], {"inputs": x})[0]
    expected = np.load(folder / "outputs.npy") * std + mean
    error = float(np.abs((got - expected) / std).max())
    assert error < TOLERANCE, error
    print(f"numbers: outputs differ by {error:.1e} standard deviations at most")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()
    tags = read.Tags()
    assert "actions" in tags["histograms"], tags
    text = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    assert "| seed | 42 |" in text["settings"] and "1 GERMINATE" in text["run"], text
    for histogram in read.Histograms("actions"):
        assert histogram.histogram_value.num == 2, histogram
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags["scalars"]}


def events(folder: Path) -> dict[tuple[int, int], dict]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step_completed"]
    return {(step["env"], step["step"]): step for step in steps}


def check_board(folder: Path, board: Path, steps: int) -> None:
    shown, told = scalars(board), events(folder)
    for key in ("train_loss", "control_accuracy", "host_gradient_norm"):
        for env in range(2):
            points = shown[f"{key}/env {env}"]
            assert [step for step, _ in points] == list(range(1, steps + 1)), (key, points)
            for step, value in points:
                assert np.float32(told[env, step - 1][key]) == np.float32(value), (key, step)


def check_tensorboard(scratch: Path) -> None:
    usual = "train --preset quick --host minimal --envs 2 --controller random --batch 32 --max-batches 2 --quiet"
    folder = scratch / "board"
    run(f"{usual} --steps 6 --tensorboard --run-dir {folder}")
    check_board(folder, folder / "tensorboard", 6)
    run(f"export tensorboard {folder} --out {scratch}/exported")
    check_board(folder, scratch / "exported", 6)
    refused = run(f"export tensorboard {folder} --out {scratch}/exported", code=2)
    assert "without event files" in refused.stderr, refused.stderr

    # Killed in the middle, with records that the resumed run does not repeat.
    folder = scratch / "killed"
    words = f"{usual} --steps 24 --checkpoint-every 5 --tensorboard --run-dir {folder}".split()
    started = subprocess.Popen([meristem, *words])
    events_file, board = folder / "events.jsonl", folder / "tensorboard"
    limit = time.monotonic() + 120
    while not (list(folder.glob("checkpoints/*")) and events_file.read_text().count('"step_completed"') > 14):
        assert time.monotonic() < limit and started.poll() is None, "no checkpoint"
        time.sleep(0.05)
    started.kill()
    started.wait()
    torn = next(board.glob("events.out.tfevents.*"))
    with torn.open("ab") as file:
        file.write(os.urandom(11))
    run(f"train --resume {folder} --quiet")
    assert not torn.exists() and len(list(board.iterdir())) == 1
    check_board(folder, board, 24)

    run(f"train --preset quick --host minimal --envs 2 --controller ppo --rounds 2 --steps 3 --batch 32",
        f"--max-batches 2 --policy-hidden 16 --quiet --tensorboard --run-dir {scratch}/ppo")
    read = EventAccumulator(str(scratch / "ppo/tensorboard"), size_guidance=EVERYTHING).Reload()
    assert [e.step for e in read.Scalars("policy/kl")] == [3, 6]
    assert sum(h.histogram_value.num for h in read.Histograms("policy/actions")) == 12

    # An episode that was extended on resume, before a second one.
    folder = scratch / "extended"
    run("train --preset quick --host minimal --envs 1 --controller random --rounds 2 --steps 3 --batch 32",
        f"--max-batches 2 --quiet --tensorboard --stop-after 2 --run-dir {folder}", code=3)
    run(f"train --resume {folder} --steps 4 --quiet --tensorboard")
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance=EVERYTHING).Reload()
    assert [e.step for e in read.Scalars("train_loss/env 0")] == list(range(1, 9))

    # Members in two places: the third begins alone.
    folder = scratch / "places"
    run("train --preset quick --host minimal --controller random --samples 3 --space lr=uniform:0.01,0.02 --places 2",
        f"--epoch full --steps 2 --batch 32 --max-batches 2 --quiet --tensorboard --run-dir {folder}")
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance=EVERYTHING).Reload()
    counts = [(h.step, h.histogram_value.num) for h in read.Histograms("actions")]
    assert counts == [(1, 2), (2, 2), (3, 1), (4, 1)], counts
    assert [e.step for e in read.Scalars("speed/images_per_s")] == [1, 2, 3, 4]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for check in (check_onnx, check_inputs, check_numbers, check_tensorboard):
            begun = time.monotonic()
            check(Path(name))
            print(f"{check.__name__}: ok, {time.monotonic() - begun:.1f} s")
