"""Compares `meristem.torch` with `meristem.network`, and runs the examples that need PyTorch.

Optional, because PyTorch is large: `pip install torch`, then `python crates/python/tests/torch_check.py`.
"""

import os
import re
import tempfile
from pathlib import Path

import numpy as np
import torch

import meristem
import meristem.torch
from meristem.network import logits

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    names: dict[str, object] = {"__name__": "docs"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    run = names["run"]
    assert isinstance(run, meristem.Run)
    weights = meristem.weights.load(run.weights(0))
    network = meristem.torch.load(weights)
    assert set(network.state_dict()) == set(weights.tensors)
    [batch] = next(meristem.GatherBatches(meristem.Dataset(split="test"), 100).epoch())
    with torch.no_grad():
        own = network(torch.from_dlpack(batch.inputs)).numpy()
    difference = np.abs(own - logits(weights, np.from_dlpack(batch.inputs))).max()
    # Sums of some hundred float32 values of about 1.
    assert difference < 1e-4, difference
    print(f"logits of PyTorch and numpy differ by {difference:.1e} at most")


if __name__ == "__main__":
    main()
