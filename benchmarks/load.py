"""Another process that computes on the card, as a neighbour's would."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tlxgen.tuner.process import Child

_PRODUCTS = 8  # between pauses: about 15 ms of an H200


@dataclass(frozen=True)
class Load:
    """Multiplies matrices in a thread of its process, until that ends."""

    pause_s: float  #: after each few products
    device: str = "cuda"
    size: int = 8192
    begin_s: float = 90.0  #: it has to be there by then

    def __call__(self) -> None:
        """Returns once the load is there.

        Raises:
            RuntimeError: it did not begin.
        """
        begun = threading.Event()
        threading.Thread(target=self._multiply, args=(begun,), daemon=True).start()
        if not begun.wait(self.begin_s):
            raise RuntimeError("the load did not begin")

    def _multiply(self, begun: threading.Event) -> None:
        import torch

        a = torch.ones(self.size, self.size, dtype=torch.bfloat16, device=self.device)
        product = torch.empty_like(a)
        while True:
            for _ in range(_PRODUCTS):
                torch.mm(a, a, out=product)
            product[0, 0].item()  # waits for them
            begun.set()
            time.sleep(self.pause_s)


@contextmanager
def beside(load: Load | None) -> Iterator[None]:
    """Has a process load the card meanwhile, or none."""
    if load is None:
        yield
        return
    child = Child()
    try:
        child.call(load, load.begin_s + 30.0)
        yield
        assert child.alive, "the load ended before what it was to disturb"
    finally:
        child.kill()
