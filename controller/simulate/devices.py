"""Accelerators by name: what their makers publish, and what of that a program is taken to reach.

Rates are peaks: 16-bit matrix products without sparsity, accumulated in float32; the memory's bandwidth; one direction
of a device's links to its peers, and of its link to the host. `Reach` says which share of a peak is assumed. Those are
judgement and no measurement; `measured` replaces them by what bench/gpu_check.py found, as far as that goes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

T, G = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    flops: float  # a second
    memory_bytes: float
    bandwidth: float  # bytes a second
    link: float  # to its peers, one direction
    host_link: float  # one direction
    source: str


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 312 * T, 40 * G, 1555 * G, 300 * G, 32 * G, "NVIDIA A100 data sheet: SXM4 40GB, NVLink 3"),
        Device("a100-80gb", 312 * T, 80 * G, 2039 * G, 300 * G, 32 * G, "NVIDIA A100 data sheet: SXM4 80GB, NVLink 3"),
        Device("h100-80gb", 989 * T, 80 * G, 3350 * G, 450 * G, 64 * G, "NVIDIA H100 data sheet: SXM5, NVLink 4"),
        Device("h200-141gb", 989 * T, 141 * G, 4800 * G, 450 * G, 64 * G, "NVIDIA H200 data sheet: SXM5, NVLink 4"),
        Device(
            "b200-180gb", 2250 * T, 180 * G, 8000 * G, 900 * G, 64 * G, "NVIDIA DGX B200 data sheet, an eighth of it"
        ),
        Device("l4-24gb", 121 * T, 24 * G, 300 * G, 32 * G, 32 * G, "NVIDIA L4 data sheet; peers over PCIe 4 x16"),
        Device("l40s-48gb", 362 * T, 48 * G, 864 * G, 32 * G, 32 * G, "NVIDIA L40S data sheet; peers over PCIe 4 x16"),
        Device("a10-24gb", 125 * T, 24 * G, 600 * G, 32 * G, 32 * G, "NVIDIA A10 data sheet; peers over PCIe 4 x16"),
        Device("rtx4090-24gb", 165 * T, 24 * G, 1008 * G, 32 * G, 32 * G, "NVIDIA Ada white paper; peers over PCIe 4"),
        Device("mi300x-192gb", 1307 * T, 192 * G, 5300 * G, 448 * G, 64 * G, "AMD MI300X data sheet, Infinity Fabric"),
    )
}


class DeviceError(ValueError):
    """A device that is not known, or a report that cannot be read."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Shares of a device's peaks, and the seconds that cost nothing to any of them."""

    flops: float = 0.6
    bandwidth: float = 0.8
    link: float = 0.7
    host_link: float = 0.8
    step_s: float = 0.5e-3  # of any step: its message, inputs, sampling
    layer_s: float = 15e-6  # of a layer: launches in a recorded graph
    reduce_s: float = 12e-6  # of an all-reduce, beside its bytes
    move_s: float = 5e-6  # of a block moved to or from the host, beside its bytes
    by_block_size: Mapping[int, float] = field(default_factory=dict)  # bandwidth share of attention, where measured

    def attention(self, block_size: int) -> float:
        """The share of the bandwidth at which attention reads blocks of this size."""
        if not self.by_block_size:
            return self.bandwidth
        return self.by_block_size[min(self.by_block_size, key=lambda size: (abs(size - block_size), size))]


def device_named(name: str) -> Device:
    """Raises DeviceError."""
    if name not in DEVICES:
        raise DeviceError(f"{name!r} is no device of the table; give one of {', '.join(DEVICES)}")
    return DEVICES[name]


def measured(path: Path) -> tuple[Device, Reach]:
    """A device as bench/gpu_check.py found it. Products and links between peers stay as published. DeviceError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        words = set(re.findall(r"[a-z0-9]+", str(report["device"]).lower()))
        copied = float(report["copy_gb_s"]) * G
        parts = {name: part.get("rows", []) for name, part in report["parts"].items()}
        known = [device for name, device in DEVICES.items() if name.split("-")[0] in words]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeviceError(f"{path}: no report of bench/gpu_check.py ({type(error).__name__}: {error})") from error
    if not known:
        raise DeviceError(f"{path}: its device is {report['device']!r}, of which the table knows nothing; add it there")
    try:
        return known[0], _reach(parts, copied, known[0])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DeviceError(f"{path}: a row lacks something ({type(error).__name__}: {error})") from error


def _reach(parts: Mapping[str, list[dict[str, Any]]], copied: float, device: Device) -> Reach:
    reach, peak = Reach(), device.bandwidth
    decodes = [float(row["of_copy"]) for row in parts.get("decode", []) if row["batch"] >= 16]
    reach = replace(reach, bandwidth=copied * (median(decodes) if decodes else 1.0) / peak)
    sizes = {int(row["block_size"]): copied * float(row["of_copy"]) / peak for row in parts.get("block_sizes", [])}
    swaps = [float(row[f"swap_{way}_gb_s"]) * G for row in parts.get("moves", []) for way in ("out", "in")]
    if swaps:  # what a block costs by itself is in these
        reach = replace(reach, host_link=median(swaps) / device.host_link, move_s=0.0)
    return replace(reach, by_block_size=sizes)
