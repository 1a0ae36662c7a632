"""What this set asks of a CUDA or HIP runtime: which device it cuts for, a stream beside the one that computes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from kilburn.kernels.triton.paged_attention import Device


def device_of(device: torch.device) -> Device:
    traits = torch.cuda.get_device_properties(device)
    hip = str(getattr(traits, "gcnArchName", "")).split(":")[0] if torch.version.hip else ""
    return Device(hip or f"sm_{traits.major}{traits.minor}", traits.multi_processor_count)


def beside(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """What is asked for inside runs on one side stream, after all that was asked for before and before what follows."""
    stream = torch.cuda.Stream(device)

    @contextmanager
    def aside() -> Iterator[None]:
        computing = torch.cuda.current_stream(device)
        stream.wait_event(computing.record_event())
        with torch.cuda.stream(stream):
            yield
        computing.wait_event(stream.record_event())

    return aside
