"""What this set asks of a CUDA or HIP runtime: which device it cuts for, a stream beside another, a clock."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from kilburn.kernels.triton.paged_attention import Device


def device_of(device: torch.device) -> Device:
    traits = torch.cuda.get_device_properties(device)
    hip = str(getattr(traits, "gcnArchName", "")).split(":")[0] if torch.version.hip else ""
    return Device(hip or f"sm_{traits.major}{traits.minor}", traits.multi_processor_count)


def beside(device: torch.device, runtime: Any = torch.cuda) -> Callable[[], AbstractContextManager[object]]:
    """What is asked for inside runs on one side stream, after all that was asked for before and before what follows.

        computing   ..writes block 3 |record|                    |wait| writes block 3 anew ..
        aside                        |wait|  copies block 3 out  |record|

    So a block is copied once what wrote it has ended, and is written or read again once its copy has. All that is
    aside is in one order, so that a block on the host is never read and filled at once either. `runtime` has the
    streams; torch's, but for tests of the order.
    """
    stream = runtime.Stream(device)

    @contextmanager
    def aside() -> Iterator[None]:
        computing = runtime.current_stream(device)
        stream.wait_event(computing.record_event())
        with runtime.stream(stream):
            yield
        computing.wait_event(stream.record_event())

    return aside


class EventWatch:
    """Two events on the stream that computes. What `beside` brackets lies between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._began.record(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        self._ended.record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1000.0
