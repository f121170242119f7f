"""Fixtures that several test modules share. Each starts and stops what it needs itself."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def cases() -> Path:
    """Inputs that real people brought; see the README of each group."""
    return ROOT / "tests" / "cases"


@pytest.fixture(scope="session")
def base_model() -> Path:
    """Directory of the small real model (SmolLM2-135M-Instruct, BF16), fetched and converted on first use."""
    from cluster import models
    from jobs import config

    return models.fetch(config.load(None, [f"model.cache={ROOT / 'models'}"])).path
