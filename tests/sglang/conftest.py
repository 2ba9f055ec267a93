"""Settings of the tests that need sglang. `make test-sglang` runs them, in an environment that has it."""

import os
from importlib.util import find_spec

import pytest
import torch

os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")  # the wheel has no sources to build
torch.set_num_threads(1)
pytest.register_assert_rewrite("scenarios", "world")


def pytest_configure(config: pytest.Config) -> None:
    """sglang warns of much that is not ours. (`tests/sglang` itself is found where sglang is missing.)"""
    if find_spec("sglang") is not None and find_spec("sglang.srt") is not None:
        config.addinivalue_line("filterwarnings", "ignore")
