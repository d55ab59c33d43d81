"""The network of a weights file, beside the engine's own results."""

import numpy as np
import pytest

import meristem
from meristem import errors
from meristem.control import Env
from meristem.network import logits

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


def test_numpy_has_the_engine_s_results_for_every_blueprint_and_style(tiny):
    """Float32 sums of the engine differ from float64 by some 1e-6 of a loss of about 2."""
    names = list(KINDS)

    def controller(env: Env):
        [slot, *_] = env.slots
        if "GERMINATE" in slot.ops:
            name = names[env.env]
            plant = {"op": "GERMINATE", "slot": slot.slot, "blueprint": name}
            return {**plant, "style": KINDS[name], "tempo": "fast"}
        advances = slot.gate_passes and slot.stage in ("germinated", "training")
        return {"op": "ADVANCE", "slot": slot.slot} if advances else None

    settings = {**tiny, "host": "cnn:channels=4,blocks=2", "steps": 8, "envs": 7, "max_batches": 8}
    run = meristem.train(**settings, controller=controller, min_training_steps=1, twin=False)
    for env in run.summary["envs"]:
        [module] = env["modules"]
        assert module["stage"] in ("blending", "holding") and module["alpha"] > 0.3, module
        weights = meristem.weights.load(run.weights(env["env"]))
        loss, accuracy = results(weights)
        assert loss == pytest.approx(env["test_loss"], abs=1e-5), module
        assert accuracy == env["test_accuracy"], module


def test_files_that_are_no_weights_are_refused(tmp_path):
    for contents, text in [
        (b"", "header is cut off"),
        (b"\xff" * 100, "header is cut off"),
        ((5).to_bytes(8, "little") + b"{...}", "is not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
        (
            (67).to_bytes(8, "little")
            + b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999]}}    ',
            "lies outside of the file",
        ),
    ]:
        path = tmp_path / "w.safetensors"
        path.write_bytes(contents)
        with pytest.raises(errors.WeightsError, match="w.safetensors") as caught:
            meristem.weights.load(path)
        assert text in str(caught.value)
    with pytest.raises(errors.WeightsError, match="cannot read .*No such file"):
        meristem.weights.load(tmp_path / "none")
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(errors.WeightsError, match="no `topology`"):
        logits(path, np.zeros((1, 1, 28, 28)))
