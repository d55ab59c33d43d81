"""The network of a weights file, compared with the engine."""

import json
import os
import pickle

import numpy as np
import pytest

import meristem
from meristem import errors
from meristem.control import Env
from meristem.network import FUNCTIONS, Numpy, host_of, logits

KINDS = {
    "norm": "linear_add",
    "attention": "linear_multiply",
    "depthwise": "sigmoid_add",
    "bottleneck": "linear_gate",
    "conv_small": "linear_multiply",
    "conv_light": "linear_gate",
    "conv_heavy": "linear_add",
}


def results(weights: meristem.weights.Weights) -> tuple[float, float]:
    """Loss and accuracy on the test split, by numpy."""
    loss, correct, count = 0.0, 0, 0
    for [batch] in meristem.GatherBatches(meristem.Dataset(split="test"), 500, shuffle=False).epoch(
        0
    ):
        x, y = np.from_dlpack(batch.inputs), np.from_dlpack(batch.targets)
        z = logits(weights, x)
        z -= z.max(axis=1, keepdims=True)
        own = z[np.arange(len(y)), y]
        loss += float((np.log(np.exp(z).sum(axis=1)) - own).sum())
        correct += int((z.argmax(axis=1) == y).sum())
        count += len(y)
    return loss / count, correct / count


def train_with(settings, kinds: dict[str, str]) -> meristem.Run:
    """A run in which env e grows the e-th blueprint of ``kinds``, with its style."""
    names = list(kinds)

    def controller(env: Env):
        [slot, *_] = env.slots
        if "GERMINATE" in slot.ops:
            name = names[env.env]
            plant = {"op": "GERMINATE", "slot": slot.slot, "blueprint": name}
            return {**plant, "style": kinds[name], "tempo": "fast"}
        advances = slot.gate_passes and slot.stage in ("germinated", "training")
        return {"op": "ADVANCE", "slot": slot.slot} if advances else None

    few = {"host": "cnn:channels=4,blocks=2", "steps": 8, "max_batches": 8, "envs": len(kinds)}
    settings = {**settings, **few, "min_training_steps": 1, "twin": False}
    return meristem.train(**settings, controller=controller)


def check_results(env, weights: meristem.weights.Weights) -> None:
    """Compares with the engine, whose float32 sums differ by about 1e-6 at a loss of about 2."""
    [module] = env["modules"]
    assert module["stage"] in ("blending", "holding") and module["alpha"] > 0.3, module
    loss, accuracy = results(weights)
    assert loss == pytest.approx(env["test_loss"], abs=1e-5), module
    assert accuracy == env["test_accuracy"], module


def test_numpy_has_the_engine_s_results_for_every_blueprint_and_style(tiny):
    run = train_with(tiny, KINDS)
    for env in run.summary["envs"]:
        weights = meristem.weights.load(run.weights(env["env"]))
        check_results(env, weights)
        # A file of an older version has no layers; the description of the host gives the same.
        older = {key: value for key, value in weights.metadata.items() if key != "host"}
        before = meristem.weights.Weights(weights.tensors, older)
        assert host_of(before) == host_of(weights) == weights.metadata["host"]


def test_numpy_has_the_engine_s_results_for_every_function(tiny, tmp_path):
    conv = {"conv": {"out": {"times": {"by": 2}}, "kernel": 1, "depthwise": False}}
    last = [{**conv, "conv": {**conv["conv"], "out": "same"}}, {"group_norm": {"zero": True}}]
    layers = {name: name for name in FUNCTIONS} | {"leaky_relu": {"leaky_relu": {"slope": 0.3}}}
    layers["dropout"] = {"dropout": {"p": 0.3}}
    own = tmp_path / "own.json"
    blueprints = [
        {"name": f"own_{name}", "layers": [conv, layer, *last], "join": "residual"}
        for name, layer in layers.items()
    ]
    own.write_text(json.dumps({"blueprints": blueprints}))
    kinds = {blueprint["name"]: "linear_add" for blueprint in blueprints}
    run = train_with({**tiny, "blueprints": own}, kinds)
    for env in run.summary["envs"]:
        check_results(env, meristem.weights.load(run.weights(env["env"])))


def test_numpy_normalises_vectors_as_images_of_one_pixel():
    generator = np.random.default_rng(1)
    x, weight, bias = (generator.normal(size=size) for size in ((3, 4), 4, 4))
    values = {"weight": weight, "bias": bias, "running_mean": bias, "running_var": weight**2}
    numpy = Numpy({f"bn.{name}": value for name, value in values.items()})
    image = x[:, :, None, None]
    assert (numpy.batch_norm(x, "bn") == numpy.batch_norm(image, "bn")[:, :, 0, 0]).all()
    vector = numpy.group_norm(x, 2, weight, bias)
    assert (vector == numpy.group_norm(image, 2, weight, bias)[:, :, 0, 0]).all()


def test_files_that_are_no_weights_are_refused(tmp_path):
    for contents, text in [
        (b"", "header too small"),
        (b"\xff" * 100, "header too large"),
        ((5).to_bytes(8, "little") + b"{...}", "not a safetensors file, or a damaged one"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file, or a damaged one"),
        (
            (67).to_bytes(8, "little")
            + b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999]}}    ',
            "not a safetensors file, or a damaged one",
        ),
    ]:
        path = tmp_path / "w.safetensors"
        path.write_bytes(contents)
        with pytest.raises(errors.WeightsError, match="w.safetensors") as caught:
            meristem.weights.load(path)
        assert text in str(caught.value)
    for save, text in [
        (lambda file: np.save(file, np.zeros(3)), "an array of numpy (.npy)"),
        (lambda file: np.savez(file, x=np.zeros(3)), "a zip archive, as torch.save (.pt, .pth)"),
        (lambda file: pickle.dump({"x": 1}, file), "a pickle"),
    ]:
        with path.open("wb") as file:
            save(file)
        with pytest.raises(errors.WeightsError, match="safetensors.torch.save_file") as caught:
            meristem.weights.load(path)
        assert text in str(caught.value) and "damaged" not in str(caught.value)
    with pytest.raises(errors.WeightsError, match="cannot read .*No such file"):
        meristem.weights.load(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for name, found in [("pipe", "a pipe or a device"), ("", "a folder")]:
        with pytest.raises(errors.WeightsError, match=f"a plain file, got {found}"):
            meristem.weights.load(tmp_path / name)
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(errors.WeightsError, match="no `topology`"):
        logits(path, np.zeros((1, 1, 28, 28)))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_pytorch_wrappers_are_removed(trained, tmp_path, prefix):
    weights = meristem.weights.load(trained.weights(0))
    path = tmp_path / "wrapped.safetensors"
    wrapped = {prefix + name: x for name, x in weights.tensors.items()}
    meristem.weights.Weights(wrapped, weights.metadata).save(path)
    with pytest.warns(UserWarning, match=f"begin with `{prefix}`; the prefix is left out"):
        read = meristem.weights.load(path)
    assert read.tensors.keys() == weights.tensors.keys() and read.contents == weights.contents
    wrapped["other"] = np.zeros(1, np.float32)
    path.unlink()
    meristem.weights.Weights(wrapped, weights.metadata).save(path)
    assert meristem.weights.load(path).tensors.keys() == wrapped.keys()


@pytest.mark.parametrize(
    ("tensors", "metadata", "text"),
    [
        ({"x": np.zeros(2)}, {}, "`tensors`: x is float64, expected float32, int64 or uint8"),
        ({"x": np.zeros(2, np.float16)}, {}, "x is float16"),
        ({"x": "text"}, {}, "x is str"),
        ({3: np.zeros(2, np.float32)}, {}, "`tensors`: got 3, expected names that are text"),
        ({}, {"x": {1, 2}}, "`metadata['x']`: got {1, 2}, expected JSON"),
        ({}, {"x": float("nan")}, "`metadata['x']`: got nan, expected JSON"),
    ],
)
def test_unsupported_weights_are_refused_and_write_nothing(
    tmp_path, tensors, metadata, text
):
    path = tmp_path / "w.safetensors"
    with pytest.raises(errors.WeightsError) as caught:
        meristem.weights.Weights(tensors, metadata).save(path)
    assert text in str(caught.value) and not path.exists()


def test_tensors_of_any_layout_are_saved_row_major(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for name, given in [("t", x.T), ("s", x[:, ::2]), ("big", x.astype(">f4")), ("zero", x[:0])]:
        path = tmp_path / name
        meristem.weights.Weights({name: given, "n": np.int64(3)}, {"text": "[no JSON"}).save(path)
        read = meristem.weights.load(path)
        assert (read.tensors[name] == given).all() and read.tensors["n"] == 3, name
        assert read.metadata == {"text": "[no JSON"}
