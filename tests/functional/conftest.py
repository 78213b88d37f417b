"""Fixtures that the tests of functions share: a fresh cache of kernels, and a CPU that seems to have kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tlxgen.functional import dispatch
from tlxgen.runtime import checks, kernel


@pytest.fixture
def no_cached_kernels() -> Iterator[None]:
    """No kernel of another test is cached."""
    kernel.forget()
    yield
    kernel.forget()


@pytest.fixture
def kernels_on_cpu(no_cached_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the CPU had kernels; `get_kernel` gives torch's there."""
    monkeypatch.setattr(dispatch, "kernels_here", lambda: True)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    monkeypatch.setattr(kernel, "_current_device", lambda: None)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kernel.FallbackWarning)
        yield
