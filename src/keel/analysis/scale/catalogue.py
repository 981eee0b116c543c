"""Models by their published configs, devices by their data sheets, and the default efficiencies."""

from __future__ import annotations

from collections.abc import Mapping

from keel.analysis.scale.shapes import Efficiency, Hardware, ModelShape

DEFAULT = Efficiency()
"""Fixed before any published run was compared, and not changed after."""

MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("Qwen2.5-1.5B", 28, 1536, 1536, 256, 8960, 151_936, True, 2 * 1536 + 2048),
        ModelShape("Qwen2.5-7B", 28, 3584, 3584, 512, 18_944, 152_064, False, 2 * 3584 + 4608),
        ModelShape("Llama-3.1-8B", 32, 4096, 4096, 1024, 14_336, 128_256, vectors=8192),
        ModelShape("Llama-3.1-70B", 80, 8192, 8192, 1024, 28_672, 128_256, vectors=16_384),
        ModelShape("Llama-3.1-405B", 126, 16_384, 16_384, 1024, 53_248, 128_256, vectors=32_768),
        ModelShape("Baichuan-7B", 32, 4096, 4096, 4096, 11_008, 64_000, vectors=8192),
        ModelShape("Qwen3-32B", 64, 5120, 8192, 1024, 25_600, 151_936, vectors=2 * 5120 + 256),
        ModelShape(
            "Qwen3-30B-A3B",
            *(48, 2048, 4096, 512, 6144, 151_936),
            vectors=2 * 2048 + 256,
            experts=128,
            active=8,
            expert_mlp=768,
        ),
        ModelShape(
            "Qwen3-235B-A22B",
            *(94, 4096, 8192, 512, 12_288, 151_936),
            vectors=2 * 4096 + 256,
            experts=128,
            active=8,
            expert_mlp=1536,
        ),
        # Latent attention: queries of 192 and values of 128 for each of 128 heads count as 160; the
        # weights are q_a, q_b, kv_a, kv_b and o; a layer stores 512 + 64 numbers of a token.
        ModelShape(
            "DeepSeek-V3",
            *(61, 7168, 128 * 160, 128 * 160, 18_432, 129_280),
            vectors=2 * 7168 + 1536 + 512,
            experts=256,
            active=8,
            shared=1,
            expert_mlp=2048,
            dense_layers=3,
            attention=7168 * 1536
            + 1536 * 128 * 192
            + 7168 * 576
            + 512 * 128 * 256
            + 128 * 128 * 7168,
            cached=576,
        ),
    )
}

HARDWARE: Mapping[str, Hardware] = {
    machine.name: machine
    for machine in (
        Hardware("A100", 312e12, 2.039e12, 80e9, 300e9, 25e9),
        Hardware("A800", 312e12, 2.039e12, 80e9, 200e9, 25e9),
        Hardware("H100", 989e12, 3.35e12, 80e9, 450e9, 50e9),
        Hardware("H800", 989e12, 3.35e12, 80e9, 200e9, 50e9),
        Hardware("H200", 989e12, 4.8e12, 141e9, 450e9, 50e9),
    )
}
"""SXM modules, bfloat16 without sparsity; a network of 200 (Ampere) or 400 Gbit/s a device."""
