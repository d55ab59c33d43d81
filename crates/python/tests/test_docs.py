"""The Python examples in the documents."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md", "docs/python.md", "docs/control.md", "docs/data.md", "docs/tasks.md", "docs/members.md", "docs/optimizers.md", "docs/sweeps.md", "docs/learners.md", "docs/exchange.md", "docs/growth.md", "docs/growth-bench.md", "docs/scikit-learn.md", "crates/python/README.md"])
def test_the_examples_run_in_their_order(page, tmp_path, monkeypatch):
    if page == "docs/scikit-learn.md":
        pytest.importorskip("sklearn", minversion="1.6")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    # Examples that need PyTorch are run by `torch_check.py`.
    blocks = re.findall(r"(<!-- needs: torch -->\n)?```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "docs"}
    for needs_torch, block in blocks:
        if not needs_torch:
            exec(compile(block, page, "exec"), names)
