"""From hidden states to log-probabilities without a (tokens × vocabulary) matrix, and to values.

Logits are computed for a chunk of tokens at a time, in the forward pass and again in the backward
pass, so that only one chunk of them exists. The gradients are explicit; with z the logits after
scale, soft cap and temperature, p = softmax(z), a the token, H the entropy, D a divergence to
another policy and d_v = ∂D/∂ log p_v, by autograd within a chunk:

    ∂ log p_a / ∂z_v = 1[v = a] − p_v
    ∂ H / ∂z_v       = −p_v (log p_v + H)
    ∂ D / ∂z_v       = d_v − p_v Σ_u d_u

Logits are float32 whatever the model's dtype (float64 for a float64 model), also under
autocast. What the products W h and those of the gradients are rounded to is the head's `dtype`:
their sums, and all else, stay in float32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from keel.config.model import HeadDtype
from keel.models.kernels import has_triton
from keel.models.kernels.sampling import HeadWeight, head_library
from keel.objective.divergences import relative_entropy

CHUNK_BYTES = 32 * 2**20
"""Bytes of one chunk of float32 logits on a CPU, which fits its cache."""
GPU_CHUNK_BYTES = 2**30
"""The same on a GPU, which small products leave idle; of a small one `GPU_SHARE` at most."""
GPU_SHARE = 64
OTHERS_SHARE = 4
"""Of which a chunk is one part where there are other policies' logits, too."""
SUM_BYTES = 4 * 2**20
"""Bytes of logits whose log-sum-exp is taken at a time on a CPU."""
CHUNK_TOKENS = 16
"""Fewest tokens in a chunk: below this the matrix product is slow."""


@dataclass(frozen=True, eq=False)
class Head:
    """How logits come from hidden states: softcap(scale · (W h + b)).

    softcap(x) = c · tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2); None leaves it out. Only
    the first `tokens` of the V rows count (None: all): the rest of a padded vocabulary has no text.
    `dtype` is that of the products (`model.head_dtype`); of a float64 model they are exact.
    """

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, "V"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    tokens: int | None = None
    dtype: HeadDtype = "float32"

    def detached(self) -> Head:
        """The same head without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, weight=self.weight.detach(), bias=bias)

    @property
    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the rows that count."""
        return self.weight[: self.tokens], None if self.bias is None else self.bias[: self.tokens]


@dataclass(frozen=True, eq=False)
class Scores:
    """Of the scored tokens (or actions): None for what was not asked for."""

    log_prob_N: Float[Tensor, "N"]
    entropy_N: Float[Tensor, "N"] | None
    value_N: Float[Tensor, "N"] | None
    full_kl_N: Float[Tensor, "N"] | None
    squares_N: Float[Tensor, "N"] | None = None
    """Σ_v π², without a gradient."""
    distillation_N: Float[Tensor, "N"] | None = None
    """The divergence to a teacher."""
    extra_log_prob_M: Float[Tensor, " M"] | None = None
    """Of tokens that only auxiliary terms read."""
    extra_distillation_M: Float[Tensor, " M"] | None = None

    def parted(self, place_R: Int[Tensor, "R"], count: int) -> Scores:
        """These of R tokens, whose first `count` are at the first of the places: all of them, and
        of the others the log-probability, and the divergence to a teacher if there is one."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        own: dict[str, Any] = {n: x[place_R[:count]] for n, x in every.items() if x is not None}
        rest_M, taught_R = place_R[count:], self.distillation_N
        if taught_R is not None:
            own["extra_distillation_M"] = taught_R[rest_M]
        return replace(self, **own, extra_log_prob_M=self.log_prob_N[rest_M])


@dataclass(frozen=True, eq=False)
class OtherStates:
    """Hidden states and head of another policy, which get no gradient, and the policy's divergence
    to it: (c,) from log-probabilities (c, V) of both, the policy's first."""

    hidden_NH: Float[Tensor, "N H"]
    head: Head
    divergence: Callable[[Tensor, Tensor], Tensor]

    def slope(self, log_p: Tensor, log_q: Tensor, weight: Tensor) -> Tensor:
        """∂ Σ_n weight_n D_n / ∂ log p, of a chunk."""
        with torch.enable_grad():
            leaf = log_p.detach().requires_grad_()
            return torch.autograd.grad(self.divergence(leaf, log_q), leaf, weight)[0]


class ValueHead(nn.Module):
    """v(s) = w · h + b: one linear layer that starts at zero, so that every value starts at 0.

    In float32 (float64 for a float64 model), also under autocast.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(
            hidden_size, 1, dtype=torch.promote_types(dtype, torch.float32), device="meta"
        )
        # Empty, then zero: nn.Linear's own initialisation would use the global random state.
        self.linear.to_empty(device="cpu")
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NH: Float[Tensor, "N H"]) -> Float[Tensor, "N"]:
        """Values of the states, with the gradient to the states."""
        with torch.autocast(hidden_NH.device.type, enabled=False):
            out: Tensor = self.linear(hidden_NH.to(self.linear.weight.dtype))
        return out[:, 0].clone()  # FSDP2 warns of a view


def logits(hidden: Float[Tensor, "... H"], head: Head) -> Float[Tensor, "... V"]:
    """The model's logits, all at once and differentiable: for a few positions."""
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = _precision(hidden)
        weight, bias = head.rows
        bias = None if bias is None else bias.to(dtype)
        kind = product_dtype(head, hidden)
        if kind == "bfloat16":
            rows = hidden.reshape(-1, hidden.shape[-1])
            out = _product(rows.bfloat16(), weight.bfloat16().T).view(*hidden.shape[:-1], -1)
            return _shaped(out if bias is None else out + bias, head)
        with _TF32.on(kind == "tf32"):
            return _shaped(nn.functional.linear(hidden.to(dtype), weight.to(dtype), bias), head)


def product_dtype(head: Head, hidden: Tensor) -> HeadDtype:
    """What the products of these hidden states with the head are rounded to, `auto` resolved for
    an update: "tf32" on a GPU of NVIDIA, else "float32"."""
    if hidden.dtype == torch.float64:
        return "float32"
    return head.dtype if head.dtype != "auto" else "tf32" if hidden.is_cuda else "float32"


def _product(left: Float[Tensor, "M K"], right: Float[Tensor, "K N"]) -> Float[Tensor, "M N"]:
    """left · right; of bfloat16 matrices in float32: products of 8 bits each are exact there."""
    if left.dtype != torch.bfloat16:
        return left @ right
    # The operator has no gradient of its own, and a CPU has no such operator.
    grows = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if left.is_cuda and not grows:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Tf32:
    """Float32 products of a GPU in TF32 while a thread is within `on`.

    The setting is the process's. The backward pass runs in another thread, and enters for itself.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, "none"

    @contextmanager
    def on(self, wanted: bool) -> Iterator[None]:
        """No effect if not `wanted`."""
        if not wanted:
            yield
            return
        matmul = torch.backends.cuda.matmul
        with self._lock:
            if not self._inside:
                self._before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    matmul.fp32_precision = self._before


_TF32 = _Tf32()


def steady_logits(head: Head) -> Callable[[Float[Tensor, "R H"]], Float[Tensor, "R V"]]:
    """`logits` without gradients, of a head that does not change meanwhile: by compiled code where
    the head is float32 on a CPU."""
    product = compiled_weight(head)
    if product is None:
        return lambda states: logits(states, head)
    return lambda states: _shaped(product(states.float().contiguous()), head)


def compiled_weight(head: Head) -> HeadWeight | None:
    """The compiled product with the head's weight and bias, without scale and soft cap; None where
    the head is not float32 on a CPU, is to be rounded, or there is no compiler."""
    weight, bias = head.rows
    given = [x for x in (weight, bias) if x is not None]
    fits = all(x.dtype == torch.float32 and x.is_contiguous() for x in given)
    fits = fits and head.dtype != "bfloat16"
    if fits and weight.device.type == "cpu" and head_library() is not None:
        return HeadWeight(weight, bias)
    return None


def _shaped(out: Tensor, head: Head) -> Tensor:
    """The product W h + b with scale and soft cap applied."""
    if head.scale != 1.0:
        out = out * head.scale
    return out if head.softcap is None else head.softcap * torch.tanh(out / head.softcap)


def readout(
    hidden_NH: Float[Tensor, "N H"],
    head: Head,
    token_N: Int[Tensor, "N"],
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    reference: tuple[Float[Tensor, "N H"], Head] | None = None,
    teacher: OtherStates | None = None,
    chunk_bytes: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Scores:
    """log π(a), the entropy −Σ_v π log π, Σ_v π log(π/π_ref), and the divergence to a teacher, each
    with its gradient.

    The temperature divides the logits, the others' too. `reference` is the hidden states and the
    head of a reference policy; no gradient goes to it, or to the teacher. A chunk holds as many
    tokens as fit `chunk_bytes` of float32 logits (None: what suits the device), but at least
    `chunk_tokens`.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 (it is {temperature})")
    full = None if reference is None else OtherStates(*reference, relative_entropy)
    others = tuple(
        replace(one, hidden_NH=one.hidden_NH.detach(), head=one.head.detached())
        for one in (full, teacher)
        if one is not None
    )
    chunk_bytes = _chunk_bytes(hidden_NH.device) if chunk_bytes is None else chunk_bytes
    chunk_bytes //= OTHERS_SHARE if others else 1
    chunk = max(chunk_tokens, chunk_bytes // (4 * head.weight.shape[0]), 1)
    log_prob_N, entropy_N, *found = _Readout.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head.weight, head.bias, head, token_N, temperature, entropy, others, chunk
    )
    return Scores(
        log_prob_N,
        entropy_N if entropy else None,
        None,
        None if full is None else found[0],
        distillation_N=None if teacher is None else found[-1],
    )


@torch.no_grad()
def squares(
    hidden_NH: Float[Tensor, "N H"], head: Head, temperature: float = 1.0
) -> Float[Tensor, "N"]:
    """Σ_v π(v)², how likely two samples are to agree."""
    chunk = max(CHUNK_TOKENS, _chunk_bytes(hidden_NH.device) // (4 * head.weight.shape[0]))
    with torch.autocast(hidden_NH.device.type, enabled=False):
        policy = _Chunks(hidden_NH, head, temperature, chunk, _precision(hidden_NH))
        parts = [policy.log_softmax(rows)[0].mul_(2).exp_().sum(1) for rows in policy.slices()]
    return torch.cat(parts) if parts else hidden_NH.new_zeros(0, dtype=policy.dtype)


def log_probs(
    hidden_NH: Float[Tensor, "N H"],
    head: Head,
    token_N: Int[Tensor, "N"],
    temperature: float = 1.0,
    **options: Any,
) -> Float[Tensor, "N"]:
    """log π(a) alone; options as in `readout`."""
    return readout(hidden_NH, head, token_N, temperature, **options).log_prob_N


def _chunk_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CHUNK_BYTES
    return min(GPU_CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // GPU_SHARE)


def _precision(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _Chunks:
    """Scaled and capped logits over temperature, a chunk of tokens at a time."""

    def __init__(
        self, hidden: Tensor, head: Head, temperature: float, chunk: int, dtype: torch.dtype
    ) -> None:
        self.hidden, self.head, self.temperature, self.chunk = hidden, head, temperature, chunk
        kind = product_dtype(head, hidden)
        self.tf32 = kind == "tf32"
        self.rounded = torch.bfloat16 if kind == "bfloat16" else dtype
        # One copy for all chunks; for weights of that dtype it is the weight itself.
        weight, bias = head.rows
        self.weight = weight.to(self.rounded)
        self.bias = None if bias is None else bias.to(dtype)
        self.dtype = dtype

    def slices(self) -> Iterator[slice]:
        for start in range(0, len(self.hidden), self.chunk):
            yield slice(start, start + self.chunk)

    def states(self, rows: slice) -> Tensor:
        return self.hidden[rows].to(self.rounded)

    @property
    def fused(self) -> bool:
        """Whether Triton's kernels do what is between the products."""
        return self.hidden.is_cuda and self.dtype == torch.float32 and has_triton()

    @property
    def shape(self) -> tuple[float, float | None, float]:
        """Scale, soft cap and temperature, as the kernels take them."""
        return self.head.scale, self.head.softcap, self.temperature

    def products(self, rows: slice) -> Tensor:
        """W h + b, (c, V), a fresh buffer."""
        with _TF32.on(self.tf32):
            out = _product(self.states(rows), self.weight.T)
        if self.bias is not None:
            out += self.bias
        return out

    def logits(self, rows: slice) -> Tensor:
        """(c, V), a fresh buffer."""
        out = self.products(rows)
        if self.head.scale != 1.0:
            out *= self.head.scale
        if self.head.softcap is not None:
            out.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        return out if self.temperature == 1.0 else out.div_(self.temperature)

    def log_softmax(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(c, V) log-probabilities and (c,) log-normalisers."""
        out = self.logits(rows)
        normaliser = _normaliser(out)
        return out.sub_(normaliser[:, None]), normaliser

    def cap_slope(self, log_p: Tensor, normaliser: Tensor) -> Tensor | None:
        """∂ softcap(x)/∂x = 1 − (softcap(x)/c)², from the log-probabilities that it led to."""
        if self.head.softcap is None:
            return None
        capped = (log_p + normaliser[:, None]).mul_(self.temperature / self.head.softcap)
        return capped.square_().neg_().add_(1.0)


def _normaliser(logits: Float[Tensor, "c V"]) -> Float[Tensor, "c"]:
    """log Σ_v exp; on a CPU few tokens at a time, since its temporaries are as large."""
    few = max(1, SUM_BYTES // (logits.shape[1] * logits.element_size()))
    if logits.device.type != "cpu" or len(logits) <= few:
        return logits.logsumexp(1)
    return torch.cat([part.logsumexp(1) for part in torch.split(logits, few)])


def kernels() -> Any:
    """The Triton kernels, which only a GPU imports."""
    from keel.models.kernels import readout

    return readout


class _Gradients:
    """Accumulates the gradients of the chunks; the weight's in one buffer, in place."""

    def __init__(self, needs: tuple[bool, ...], policy: _Chunks, bias: Tensor | None) -> None:
        hidden = policy.hidden
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        shape, self.tokens = policy.head.weight.shape, len(policy.weight)
        self.weight = policy.weight.new_zeros(shape, dtype=policy.dtype) if needs[1] else None
        self.bias = None
        if bias is not None and needs[2]:
            self.bias = torch.zeros(bias.shape, dtype=policy.dtype, device=bias.device)

    def add(self, rows: slice, grad: Tensor, policy: _Chunks) -> None:
        """Add the gradient (c, V) of W h + b for a chunk of tokens."""
        rounded = grad.to(policy.rounded)
        with _TF32.on(policy.tf32):
            if self.hidden is not None:
                self.hidden[rows] = _product(rounded, policy.weight).to(self.hidden.dtype)
            if self.weight is not None and rounded.dtype == self.weight.dtype:
                self.weight[: self.tokens].addmm_(rounded.T, policy.states(rows))
            elif self.weight is not None:
                self.weight[: self.tokens] += _product(rounded.T, policy.states(rows))
        if self.bias is not None:
            self.bias[: self.tokens] += grad.sum(0, dtype=policy.dtype)

    def as_inputs(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden states, weight and bias; the last two in the weight's own dtype."""
        weight = None if self.weight is None else self.weight.to(dtype)
        return self.hidden, weight, None if self.bias is None else self.bias.to(dtype)


class _Readout(torch.autograd.Function):
    """(log-probability, entropy, divergence of each of the others); gradients as in the module's
    docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        token: Tensor,
        temperature: float,
        entropy: bool,
        others: tuple[OtherStates, ...],
        chunk: int,
    ) -> tuple[Tensor, ...]:
        dtype = _precision(hidden)
        log_prob, entropies, normaliser, *divergences = (
            torch.zeros(len(hidden), dtype=dtype, device=hidden.device)
            for _ in range(3 + len(others))
        )
        with torch.autocast(hidden.device.type, enabled=False):
            policy = _Chunks(hidden, head, temperature, chunk, dtype)
            made = [_Chunks(one.hidden_NH, one.head, temperature, chunk, dtype) for one in others]
            for rows in policy.slices():
                if not others and policy.fused:
                    out = policy.products(rows)
                    found = kernels().statistics(out, token[rows], policy.shape, entropy=entropy)
                    log_prob[rows], normaliser[rows] = found[0], found[2]
                    if found[1] is not None:
                        entropies[rows] = found[1]
                    continue
                log_p, _ = policy.log_softmax(rows)
                log_prob[rows] = log_p.gather(1, token[rows, None])[:, 0]
                if entropy:
                    entropies[rows] = -(log_p.exp().mul_(log_p)).sum(1)
                for value, one, chunks in zip(divergences, others, made, strict=True):
                    value[rows] = one.divergence(log_p, chunks.log_softmax(rows)[0])
        ctx.save_for_backward(hidden, weight, bias, token, entropies, normaliser)
        ctx.settings = (head, temperature, entropy, others, chunk)
        return log_prob, entropies, *divergences

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token, entropies, normalisers = ctx.saved_tensors
        head, temperature, entropy, others, chunk = ctx.settings
        dtype = _precision(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            head = replace(head, weight=weight, bias=bias)
            policy = _Chunks(hidden, head, temperature, chunk, dtype)
            made = [_Chunks(one.hidden_NH, one.head, temperature, chunk, dtype) for one in others]
            into = _Gradients(ctx.needs_input_grad, policy, bias)
            for rows in policy.slices():
                if not others and policy.fused:
                    known = normalisers[rows], entropies[rows] if entropy else None
                    given = grads[0][rows], grads[1][rows]
                    out = policy.products(rows)
                    shape, into_dtype = policy.shape, policy.rounded
                    out = kernels().gradient(out, token[rows], shape, known, given, into_dtype)
                    into.add(rows, out, policy)
                    continue
                g, g_entropy, *g_others = (grad[rows, None].to(dtype) for grad in grads)
                log_p, normaliser = policy.log_softmax(rows)
                slope = policy.cap_slope(log_p, normaliser)
                factor, direct = -g, None
                if entropy:
                    factor = factor - g_entropy * (log_p + entropies[rows, None])
                for one, chunks, weight_c in zip(others, made, g_others, strict=True):
                    found = one.slope(log_p, chunks.log_softmax(rows)[0], weight_c[:, 0])
                    factor = factor - found.sum(1, keepdim=True)
                    direct = found if direct is None else direct.add_(found)
                grad = log_p.exp_().mul_(factor)
                grad.scatter_add_(1, token[rows, None], g)
                if direct is not None:
                    grad += direct
                if slope is not None:
                    grad.mul_(slope)
                into.add(rows, grad.mul_(head.scale / temperature), policy)
            return *into.as_inputs(weight.dtype), *(None,) * 6


def lacks_float64(device: torch.device) -> bool:
    """Whether a device has no float64: MPS."""
    return device.type == "mps"


def place_of_float64(device: torch.device) -> torch.device:
    """Where numbers of a device are computed with in float64: there, or on the CPU."""
    return torch.device("cpu") if lacks_float64(device) else device


def widest(number: Tensor, device: torch.device) -> Tensor:
    """A float64 tensor on a device, in float32 if that has no float64."""
    return number.to(device, torch.float32) if lacks_float64(device) else number.to(device)
