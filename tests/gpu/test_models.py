"""One GPU: packed attention by the variable-length kernel, log-probabilities, and autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keel.config.model import Autocast, HeadDtype
from keel.models import attention, families
from keel.models.attention import PackedLayout, Rules
from keel.models.families import uses_autocast
from keel.models.head import Head, log_probs
from keel.models.policy import Policy, load_policy, rounding_effect
from tests.gpu import needs_gpus
from tests.models.test_attention import LAYOUTS, inputs
from tests.models.test_policy import GRADIENT, LOG_PROB, ROUNDED
from tests.models.tiny import batch, deep_model, spec, stir

pytestmark = needs_gpus(1)
DEVICE = "cuda"
WORDS = 15
HALF = 2e-2
"""bfloat16 keeps 8 bits of values near 1."""
FLOAT32 = 2e-4
"""float32 sums in another order, through two layers of enlarged weights."""


def on_device(family: str = "llama", autocast: Autocast = True, **keys: object) -> Policy:
    """A small policy with the weights of `tests.models.tiny.policy`."""
    made = spec(family, autocast=autocast, **keys).model_copy(update={"device": DEVICE})  # type: ignore[arg-type]
    policy = load_policy(made, 0)
    cpu = policy.model.cpu()
    stir(cpu)
    policy.model.to(DEVICE)
    return policy


def with_gradients(
    lengths: list[int], follows: list[int], heads: list[Tensor], rules: Rules
) -> list[Tensor]:
    """The attention of the heads, and its gradients for fixed weights of the sum, on the CPU."""
    leaves = [x.detach().clone().requires_grad_() for x in heads]
    out = PackedLayout(lengths, follows).attend(0, *leaves, rules)
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)
    grads = torch.autograd.grad((out * weight).sum(), leaves)
    return [x.detach().float().cpu() for x in (out, *grads)]


@pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("window", [None, 3], ids=["all", "window"])
def test_the_variable_length_kernel_equals_the_packed_cpu_path(
    made: tuple[list[int], list[int]], window: int | None
) -> None:
    lengths, follows = made
    half = [x.detach().bfloat16() for x in inputs(lengths)]
    rules = Rules(0.3, window)
    moved = [x.to(DEVICE) for x in half]
    query, value = (moved[at][0].transpose(0, 1) for at in (0, 2))
    assert attention.flash_applies(query, value, rules), "this GPU or this torch has no such kernel"
    found = with_gradients(lengths, follows, moved, rules)
    wanted = with_gradients(lengths, follows, [x.float() for x in half], rules)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=HALF, atol=HALF)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_probe_measures_no_rounding(
    precision: str, dtype: torch.dtype, autocast: Autocast
) -> None:
    """Nor that of TF32, if the user allows it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        families.prepare(deep_model(dtype).to(DEVICE), autocast)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_log_probs_in_float32_equal_those_on_the_cpu(family: str) -> None:
    """Equal segments by scaled dot-product attention; soft caps and sinks among the families."""
    made = on_device(family, autocast=False)
    _, packed = batch(WORDS)
    found = made.scores(packed.to(made.device), entropy=True)
    made.model.cpu()
    wanted = made.scores(packed, entropy=True)
    assert found.log_prob_N.is_cuda
    assert found.entropy_N is not None
    assert wanted.entropy_N is not None
    torch.testing.assert_close(found.log_prob_N.cpu(), wanted.log_prob_N, rtol=0, atol=FLOAT32)
    torch.testing.assert_close(found.entropy_N.cpu(), wanted.entropy_N, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize(("family", "keys"), ROUNDED, ids=str)
def test_autocast_moves_log_probs_and_gradient_within_a_bound(
    family: str, keys: dict[str, object]
) -> None:
    made = on_device(family, **keys)
    assert uses_autocast(made.model, made.autocast)
    _, packed = batch(WORDS)
    packed = packed.to(made.device)
    weight_N = torch.linspace(-1, 1, len(packed.target_N), device=DEVICE)
    assert made.scores(packed).log_prob_N.dtype == torch.float32
    effect = rounding_effect(made, packed, weight_N)
    assert 1e-5 < effect.largest < LOG_PROB
    assert 1e-5 < effect.gradient < GRADIENT


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-5), ("tf32", 2**-8), ("bfloat16", 2**-5)]
)
def test_head_is_rounded_as_its_dtype_says(dtype: HeadDtype, bound: float) -> None:
    """Logits near 1: 24, 11 and 8 bits of the factors; gradients relative to the largest."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator) / 8 for n in (300, 1000))
    token = torch.randint(0, 1000, (300,), generator=generator)
    made = []
    for device, kind in (("cpu", "float32"), (DEVICE, dtype)):
        leaves = [x.to(device).requires_grad_() for x in (hidden, weight)]
        head = Head(leaves[1], dtype=kind)  # type: ignore[arg-type]
        value = log_probs(leaves[0], head, token.to(device), chunk_bytes=0, chunk_tokens=128)
        made.append([value.detach(), *torch.autograd.grad(value.sum(), leaves)])
    for exact, found in zip(*made, strict=True):
        gap = float((found.cpu() - exact).abs().max() / exact.abs().max())
        assert gap <= bound
        assert dtype == "float32" or gap > 1e-6
