"""Seeing every operation of torch that a piece of code asks for, without torch's compiler.

torch keeps its compiler away from whoever observes, and loads all of it to do so: seconds of a start, and more than a
hundred megabytes that stay. Nothing here is ever compiled, so there is nothing to keep away.
"""

from torch.utils._python_dispatch import TorchDispatchMode


class Observer(TorchDispatchMode):
    """While one is entered, its `__torch_dispatch__` stands before every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
