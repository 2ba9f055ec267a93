"""Settings every test shares."""

import pytest
import torch
from hypothesis import settings
from radixstate.testing import Figures

FIGURES = pytest.StashKey[Figures]()

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


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    """What all fuzzing of this run came to."""
    return pytestconfig.stash.setdefault(FIGURES, Figures())


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a run that fuzzed."""
    if FIGURES in config.stash:
        print(config.stash[FIGURES])
