"""GPUs by name: memory, bandwidth and peak in bfloat16, as their makers state them. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from keel.config.fields import unknown
from keel.types import KeelError

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: bytes of memory, bytes a second that it reads, operations a second in bfloat16 with
    float32 sums, without sparsity. None: not known (a size alone was given)."""

    name: str
    memory: int
    bandwidth: float | None = None
    peak: float | None = None


# Memory is what nvidia-smi reports in all (MiB), a little less than the name says on some.
CARDS: Final[dict[str, Card]] = {
    "h200": Card("H200", 143_771 * MIB, 4.8e12, 989.4e12),
    "h100": Card("H100", 81_559 * MIB, 3.35e12, 989.4e12),
    "h100-pcie": Card("H100 PCIe", 81_559 * MIB, 2.0e12, 756e12),
    "a100": Card("A100 80GB", 81_920 * MIB, 2.039e12, 312e12),
    "a100-40": Card("A100 40GB", 40_960 * MIB, 1.555e12, 312e12),
    "l40s": Card("L40S", 46_068 * MIB, 0.864e12, 362.05e12),
    "a10g": Card("A10G", 23_028 * MIB, 0.600e12, 70e12),
    "l4": Card("L4", 23_034 * MIB, 0.300e12, 121e12),
    "5090": Card("RTX 5090", 32_607 * MIB, 1.792e12, 209.5e12),
    "4090": Card("RTX 4090", 24_564 * MIB, 1.008e12, 165.2e12),
    "3090": Card("RTX 3090", 24_576 * MIB, 0.936e12, 71e12),
}
"""Sources: NVIDIA's data sheets of H200, H100 (SXM5 and PCIe), A100 (SXM4), L40S, A10G (AWS G5) and
L4; the white papers of Blackwell, Ada and GA102 for GeForce (appendix, bfloat16 with float32
accumulation)."""

OTHERS: Final = {"laptop", "mobile", "nvl", "mig", "d", "ti"}
"""Words that make a name in the table another card (RTX 4090 D), or a part of one."""


def card(text: str) -> Card:
    """The card of a name (`h100`) or a size (`24GB`, `22.5 GiB`). Raises KeelError for others."""
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(gb|gib|g)", text.strip().lower())
    if size:
        number, unit = float(size[1]), 10**9 if size[2] == "gb" else GIB
        if number <= 0:
            raise KeelError(f"--device {text}: give a size above 0, as in 24GB")
        return Card(text.strip(), int(number * unit))
    found = CARDS.get(text.strip().lower())
    if found is None:
        raise KeelError(f"--device: {unknown('card', text, CARDS)} (or a size, as in 24GB)")
    return found


def card_named(reported: str, memory: int) -> Card:
    """The card that torch reports (`NVIDIA H100 80GB HBM3`), with the memory that it sees; one that
    is not in the table, or a part of one (MIG), is known by its name and memory alone."""
    words = set(re.split(r"[^a-z0-9]+", reported.lower()))
    key = next((key for key in CARDS if key in words), None)
    if key == "h100" and "pcie" in words:
        key = "h100-pcie"
    if key == "a100" and memory < 60 * GIB:
        key = "a100-40"
    if key is None or words & OTHERS:
        return Card(reported, memory)
    known = CARDS[key]
    return Card(reported, memory, known.bandwidth, known.peak)
