"""Compares `meristem.torch` with `meristem.network`, sums PyTorch's tensors, and runs the examples
that need PyTorch.

Optional, because PyTorch is large: `pip install torch`, then `python crates/python/tests/torch_check.py`.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import meristem
import meristem.torch
from meristem.network import Numpy, logits

DOCS = Path(__file__).parents[3] / "docs"


def sums() -> None:
    """Sums tensors of all types in place, also tensors that require a gradient."""

    def work(comm: meristem.Comm) -> list[torch.Tensor]:
        layer = torch.nn.Conv2d(3, 4, 3)
        channels_last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        tensors = [
            torch.full((7,), comm.rank + 1.0, dtype=dtype)
            for dtype in (torch.float32, torch.float64, torch.bfloat16)
        ]
        for x in (*tensors, layer.weight.data, channels_last, torch.tensor(1.0)):
            before = x.clone()
            comm.all_reduce(x, mean=True)
            assert x.dtype == before.dtype and x.stride() == before.stride()
        comm.top_k(k=2).all_reduce(layer.weight.detach())
        try:
            comm.all_reduce(layer.weight)
        except meristem.errors.MeristemError as error:
            assert "detach" in str(error) or "rank" in str(error), error
        else:
            raise AssertionError("a tensor that needs a gradient was overwritten")
        return [*tensors, layer.weight.detach()]

    one, other = meristem.Comm.run(2, work)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert all((x == 1.5).all() for x in one[:3]) and one[3].count_nonzero() <= 4


def operations() -> None:
    """The operations of `meristem.torch` and of `meristem.network.Numpy`, on the same images."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(2, 6, 7, 9))
    weight, bias = generator.normal(size=(4, 3, 3, 2)), generator.normal(size=4)
    numpy, network = Numpy({}), meristem.torch.Network
    tensors = {id(a): torch.from_numpy(a) for a in (x, weight, bias)}

    def compare(name: str, *arguments: Any, **options: Any) -> None:
        def given(value: Any) -> Any:
            if isinstance(value, list):
                return [given(each) for each in value]
            return tensors.get(id(value), value)

        own = getattr(numpy, name)(*arguments, **options)
        # The operations read no tensors of the network.
        operation, none = getattr(network, name), cast(meristem.torch.Network, None)
        other = operation(none, *map(given, arguments), **{k: given(v) for k, v in options.items()})
        # Both are float64: sums of at most 18 products of about 1.
        assert np.abs(own - other.numpy()).max() < 1e-13, name

    compare("conv2d", x, weight, (1, 2), 2, bias=bias, stride=(2, 1), dilation=(1, 3))
    compare("conv2d", x, weight, 1, 2)
    for name in ("max_pool2d", "avg_pool2d"):
        compare(name, x, 2)
        compare(name, x, (3, 2), (2, 1), (1, 0))
        compare(name, x, [1, 3], stride=[1, 2], padding=[0, 1])
    compare("max", x)
    compare("flatten", x)
    compare("concat", [x, x])
    compare("multiply", x, x)
    scale, shift = generator.normal(size=6), generator.normal(size=6)
    vectors = generator.normal(size=(5, 6))
    tensors |= {id(a): torch.from_numpy(a) for a in (scale, shift, vectors)}
    for each in (x, vectors):
        compare("layer_norm", each, scale, shift)
        compare("rms_norm", each, scale)


def main() -> None:
    sums()
    operations()
    os.chdir(tempfile.mkdtemp())
    names: dict[str, object] = {"__name__": "docs"}
    # The last page leaves the run that is compared below.
    for page in ("tasks.md", "python.md"):
        text = (DOCS / page).read_text()
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(block, page, "exec"), names)
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
