"""Settings and folders that all tests use."""

from pathlib import Path

import pytest

import meristem


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, object]:
    """Settings of a run that takes about a second."""
    return {
        "preset": "quick",
        "host": "minimal",
        "envs": 2,
        "batch": 32,
        "max_batches": 2,
        "control_split": 0.01,
        "steps": 4,
        "threads": 1,
        "run_dir": tmp_path / "run",
    }


@pytest.fixture
def trained(tiny: dict[str, object]) -> meristem.Run:
    """A complete run."""
    return meristem.train(**tiny)
