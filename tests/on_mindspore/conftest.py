"""Tests that need MindSpore; torch is not there. `make test-mindspore` runs them in their own environment."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("mindspore") is None:
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True)
def _same_start():
    """Seeds MindSpore, and puts its mode back."""
    import mindspore

    mindspore.set_seed(0)
    mode = mindspore.get_context("mode")
    yield
    mindspore.set_context(mode=mode)
