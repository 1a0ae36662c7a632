"""One thread unless a test says otherwise: the worlds are small, and threads wait for each other by spinning."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
