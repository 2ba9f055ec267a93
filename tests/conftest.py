"""Settings every test shares."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("ci", deadline=None, print_blob=True, stateful_step_count=60)
settings.register_profile("deep", settings.get_profile("ci"), stateful_step_count=150)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run where there is one, and are listed as skipped elsewhere."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
