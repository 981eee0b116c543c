"""The optimizer, its schedule, its state as named tensors; and what happens if a loss or gradient
is not finite: no step is taken, and the cause is searched for."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from keel.analysis.costs import moments
from keel.config.stage import Optimizer
from keel.learn.batch import TrainBatch, read
from keel.learn.memory import LESS, oom_context
from keel.models.head import lacks_float64
from keel.models.quantised import bitsandbytes
from keel.models.sharded import whole
from keel.types import KeelError

Named = list[tuple[str, nn.Parameter]]
DECISIVE = frozenset(
    {"loss", "loss/policy", "kl/mismatched", "value/loss", "grad_norm", "value/grad_norm"}
)
"""The metrics that decide whether a step is taken."""
_WEIGHTS = "the weights "


def trainable(module: nn.Module, prefix: str = "") -> Named:
    """The parameters that take gradients, by name, in the module's order."""
    return [(f"{prefix}{name}", p) for name, p in module.named_parameters() if p.requires_grad]


def learning_rate(choice: Optimizer, step: int, steps: int) -> float:
    """The learning rate of a step (from 0) of a stage of `steps`, warm-up first.

    Linear and cosine schedules fall from `learning_rate` to `min_lr_ratio` of it at the last step.
    """
    rising = choice.warm_up(steps)
    warm = min(1.0, (step + 1) / rising) if rising else 1.0
    span = max(steps - 1 - rising, 1)
    done = min(max((step - rising) / span, 0.0), 1.0)
    left = {
        "constant": 1.0,
        "linear": 1 - (1 - choice.min_lr_ratio) * done,
        "cosine": choice.min_lr_ratio
        + (1 - choice.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)),
    }[choice.schedule]
    return choice.learning_rate * warm * left


def _groups(parameters: Named, decay: float) -> list[dict[str, Any]]:
    """Matrices, embeddings among them, with weight decay; norms and biases without, as in
    transformers.Trainer. The biases of experts are matrices too, so the name counts as well."""
    split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, p in parameters:
        split[_decays(name, p)].append(p)
    rates = zip(split, (0.0, decay), strict=True)
    return [{"params": some, "weight_decay": rate} for some, rate in rates if some]


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and "bias" not in name and "norm" not in name


class WeightOptimizer:
    """The recipe's optimizer of named parameters, whose state saves and restores as named tensors.

    `adamw` is torch's fused AdamW and `adamw_8bit` that of bitsandbytes, whose moments are 8-bit
    numbers in blocks of 256 (arXiv:2110.02861; float32 for tensors of fewer than 4096 weights).
    `muon` steps the matrices inside of layers along the orthogonalised momentum, scaled to the size
    of AdamW's steps, so that the same learning rates serve (arXiv:2502.16982), and all else by
    AdamW. With `offload` all this happens on the CPU, on copies of the weights in float32 or wider.
    Raises KeelError if bitsandbytes is not installed.
    """

    def __init__(self, parameters: Named, choice: Optimizer) -> None:
        self.parameters = parameters
        self.choice = choice
        self._copies: Named | None = None
        if choice.offload == "cpu":
            self._copies = [(name, _host_copy(p)) for name, p in parameters]
        self._stepped = self._copies or parameters
        self._inner = _make(self._stepped, choice)

    def step(self, rate: float) -> float:
        """`step_all` of this one."""
        return step_all([self], [rate])[0]

    def clip(self) -> Tensor:
        """Shorten the gradient to `max_grad_norm`; its norm before, which no host has read."""
        limit = self.choice.max_grad_norm
        return _clip([p for _, p in self.parameters], math.inf if limit is None else limit)

    def apply(self, rate: float) -> None:
        """Step along the gradient as it is, at this learning rate."""
        for group in (group for inner in self._inner for group in inner.param_groups):
            group["lr"] = rate
        if self._copies is not None:
            self._fetch_gradients(self._copies)
        for inner in self._inner:
            inner.step()
        if self._copies is not None:
            with torch.no_grad():
                for (_, parameter), (_, own) in zip(self.parameters, self._copies, strict=True):
                    parameter.copy_(own, non_blocking=True)

    @torch.no_grad()
    def _fetch_gradients(self, copies: Named) -> None:
        """Move the gradients to the copies; their memory on the device is free again then."""
        device = None
        for (_, parameter), (_, own) in zip(self.parameters, copies, strict=True):
            if parameter.grad is None:
                own.grad = None
                continue
            if own.grad is None:
                own.grad = torch.empty_like(own, pin_memory=own.is_pinned())
            own.grad.copy_(parameter.grad, non_blocking=True)
            parameter.grad, device = None, parameter.device
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    @property
    def began(self) -> bool:
        """Whether a step was ever taken."""
        return any(inner.state for inner in self._inner)

    @property
    def pending(self) -> int:
        """Bytes of the weights' device that the first step will take for its state."""
        if self.began or self._copies is not None:
            return 0
        muon = (inner for inner in self._inner if isinstance(inner, torch.optim.Muon))
        groups = [group for inner in muon for group in inner.param_groups]
        inside = sum(p.numel() for group in groups for p in group["params"])
        return int(moments(self.choice.kind, sum(p.numel() for _, p in self._stepped), inside))

    def clear(self) -> None:
        """Drop the gradient."""
        for _, parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts as `name/exp_avg`, `name/exp_avg_sq`, `name/step`; of other kinds
        as their libraries name them. With `offload` also `name/master`, the weight itself, if it is
        wider than the model's."""
        found: dict[str, Tensor] = {}
        for at, (name, parameter) in enumerate(self._stepped):
            for inner in self._inner:
                for key, value in inner.state.get(parameter, {}).items():
                    count = not isinstance(value, Tensor)
                    found[f"{name}/{key}"] = torch.tensor(value) if count else value
            if parameter.dtype != self.parameters[at][1].dtype:
                found[f"{name}/master"] = parameter.detach()
        return found

    def allocate(self, names: Collection[str]) -> None:
        """Make room for the state of these names, in the parameters' own shards, in the order in
        which a step makes it."""
        begun = {key.rpartition("/")[0] for key in names if not key.endswith("/master")}
        named = {parameter: name for name, parameter in self._stepped}
        for inner in self._inner:
            for at, group in enumerate(inner.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if named[parameter] in begun:
                        _begin(inner, at, place, parameter)

    @torch.no_grad()
    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Copy tensors of `state`'s names into what `allocate` made.

        The copies of offloaded weights follow the model's, which are restored before.
        """
        own = dict(self._stepped)
        if self._copies is not None:
            for (_, parameter), (_, copied) in zip(self.parameters, self._copies, strict=True):
                if copied.dtype == parameter.dtype:  # else it is part of the state
                    copied.copy_(parameter)
        for key, value in self.state().items():
            name, _, leaf = key.rpartition("/")
            held = [inner.state[own[name]] for inner in self._inner if own[name] in inner.state]
            if leaf != "master" and not isinstance(held[0][leaf], Tensor):
                held[0][leaf] = int(state[key])
            elif value is not state[key]:
                value.copy_(state[key])

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The state that `state` gave."""
        self.allocate(state.keys())
        self.fill(state)


_LAYER = re.compile(r"\.\d+\.")
"""In the name of a weight inside of a layer: neither embeddings nor output layer nor value head."""


def _make(parameters: Named, choice: Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of a choice, each with its share of the parameters."""
    common: dict[str, Any] = {"lr": choice.learning_rate}
    made: list[torch.optim.Optimizer] = []
    if choice.kind == "muon":
        hidden = [one for one in parameters if one[1].ndim == 2 and _LAYER.search(one[0])]
        hidden = [one for one in hidden if _decays(*one)]
        if hidden:
            made.append(
                torch.optim.Muon(
                    _groups(hidden, choice.weight_decay),
                    momentum=choice.muon_momentum,
                    adjust_lr_fn="match_rms_adamw",
                    **common,
                )
            )
        taken = {name for name, _ in hidden}
        parameters = [one for one in parameters if one[0] not in taken]
    if not parameters:
        return made
    groups = _groups(parameters, choice.weight_decay)
    common |= {"betas": choice.betas, "eps": choice.epsilon}
    if choice.kind == "adamw_8bit":
        library = bitsandbytes('optimizer.kind = "adamw_8bit"')
        made.append(library.optim.AdamW8bit(groups, **common))
    else:
        made.append(torch.optim.AdamW(groups, fused=True, **common))
    return made


def check_optimizer(choice: Optimizer) -> None:
    """Raise KeelError if the library of an optimizer is not installed."""
    if choice.kind == "adamw_8bit":
        bitsandbytes('optimizer.kind = "adamw_8bit"')


def _begin(inner: torch.optim.Optimizer, at: int, place: int, parameter: nn.Parameter) -> None:
    """Make the state of a parameter, the one of this place in the group `at`, as a step does."""
    state = inner.state[parameter]
    if isinstance(inner, torch.optim.Muon):
        state["momentum_buffer"] = torch.zeros_like(parameter)
    elif isinstance(inner, torch.optim.AdamW):
        # The fused step counts on the parameter's own device.
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    else:
        eight: Any = inner
        eight.init_state(inner.param_groups[at], parameter, at, place)


def _host_copy(parameter: nn.Parameter) -> nn.Parameter:
    """A copy in the machine's memory, which a GPU reads and writes without a detour if it can."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    copied = parameter.detach().to("cpu", dtype, copy=True)
    return nn.Parameter(copied.pin_memory() if parameter.device.type == "cuda" else copied)


def step_all(optimizers: Sequence[WeightOptimizer], rates: Sequence[float | None]) -> list[float]:
    """Clip, step each at its learning rate and clear the gradients; the norms before clipping.

    One with the rate None takes no step. Where one of the norms is not finite none takes a step,
    and all weights stay as they were.

    Raises:
        KeelError: a step made a weight NaN or infinite, or there is no memory for the moments.
    """
    norms = read([optimizer.clip() for optimizer in optimizers])
    if all(math.isfinite(norm) for norm in norms):
        apply_all(optimizers, rates)
    for optimizer in optimizers:
        optimizer.clear()
    return norms


def apply_all(optimizers: Sequence[WeightOptimizer], rates: Sequence[float | None]) -> None:
    """Step each along its gradient as it is, at its learning rate; with the rate None not at all.

    Raises:
        KeelError: a step made a weight NaN or infinite, or there is no memory for the moments.
    """
    with oom_context("the optimizer stepped", LESS):
        for optimizer, rate in zip(optimizers, rates, strict=True):
            if rate is not None:
                optimizer.apply(rate)
    _check([optimizer.parameters for optimizer in optimizers])


def bad_weight(parameters: Named) -> str | None:
    """The name of the first weight that holds a NaN or an infinity."""
    with torch.no_grad():
        for name, parameter in parameters:
            if not bool(whole(parameter.isfinite().all())):
                return name
    return None


@torch.no_grad()
def _check(stepped: Sequence[Named]) -> None:
    """Raises KeelError if a weight that was stepped is not finite, before anything reads it."""
    # One pass of a norm, a share of what the step itself costs. The squares of weights that are
    # finite may not be: so the norm acquits, and only the search convicts.
    norms = read([_norm([p for _, p in parameters]) for parameters in stepped])
    bad = (ps for ps, norm in zip(stepped, norms, strict=True) if not math.isfinite(norm))
    name = next(filter(None, map(bad_weight, bad)), None)
    if name is not None:
        raise KeelError(
            f"the optimizer step made the weights {name} non-finite: nothing of them was saved; "
            "lower optimizer.learning_rate"
        )


def _clip(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Shorten the gradient, all of it together, to `limit`; its norm before."""
    if len(parameters) > 1 or type(parameters[0].grad) is not Tensor:
        return whole(nn.utils.clip_grad_norm_(parameters, limit))
    norm = _norm([parameters[0].grad])
    wide = norm if lacks_float64(norm.device) else norm.double()
    parameters[0].grad.mul_(torch.where(wide > limit, limit / (wide + 1e-6), 1.0))
    return norm


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The length of all of them as one vector."""
    if len(tensors) > 1:
        return whole(nn.utils.get_total_norm(tensors))
    # The same of one vector, without the cost of grouping tensors.
    return whole(torch.linalg.vector_norm(tensors[0]))


# ---------------------------------------------------------------- not finite


class NotFinite(KeelError):
    """A loss or gradient is NaN or infinite, and no step was taken; `names` are the metrics."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{', '.join(names)} came out non-finite: its step was not taken; lower "
            "optimizer.learning_rate or see the step's rollouts"
        )
        self.names = tuple(names)

    def __reduce__(self) -> tuple[type[NotFinite], tuple[tuple[str, ...]]]:
        return NotFinite, (self.names,)


def stop_unless_finite(metrics: Mapping[str, float]) -> None:
    """Raises NotFinite if a metric that decides on a step is NaN or infinite."""
    bad = _bad(metrics)
    if bad:
        raise NotFinite(bad)


@dataclass(frozen=True, slots=True)
class Cause:
    """Where a value that is not finite comes from.

    `sequence` is that of the batch and `token` its action, both from 0; None where the value comes
    from all sequences together, or from the weights.
    """

    term: str
    sequence: int | None = None
    token: int | None = None

    @property
    def weights(self) -> bool:
        """Whether the weights themselves are not finite, so that no step can be taken."""
        return self.term.startswith(_WEIGHTS)


def in_weights(parameters: Named) -> Cause | None:
    """A weight that is not finite."""
    name = bad_weight(parameters)
    return None if name is None else Cause(f"{_WEIGHTS}{name}")


def in_tensors(batch: TrainBatch[Any]) -> Cause | None:
    """A value that is not finite among the loss's inputs."""
    for name, values in tensors_of(batch).items():
        if name == "outcome_N" or not name.endswith("_N"):  # NaN is a sequence without a reward
            continue
        if values.is_floating_point() and not _finite(values):
            at = int((~values.isfinite()).nonzero()[0])
            ends = list(accumulate(batch.lengths))
            sequence = bisect_right(ends, at)
            token = at - ends[sequence] + batch.lengths[sequence]
            return Cause(TERMS.get(name, name), sequence, token)
    return None


def tensors_of(batch: TrainBatch[Any]) -> dict[str, Tensor]:
    """Every tensor of a batch by its name."""
    every = [
        (f.name, getattr(part, f.name)) for part in (batch.actions, batch) for f in fields(part)
    ]
    return {name: value for name, value in every if isinstance(value, Tensor)}


TERMS = {
    "engine_log_prob_N": "the engine's log-probability",
    "old_log_prob_N": "the old log-probability",
    "reference_log_prob_N": "the reference's log-probability",
    "value_N": "the value",
    "return_N": "the return",
    "advantage_N": "the advantage",
    "weight_N": "the weight",
}


def find_offending_sequence(
    backward: Callable[[int], Mapping[str, float]],
    sequences: Iterable[int],
    parameters: Named,
    clear: Callable[[], None],
) -> Cause:
    """The first sequence whose own loss or gradient is not finite.

    `backward(i)` adds the gradient of sequence i to the parameters' and returns its metrics, of
    which only those count that decide on a step.
    """
    for i in sequences:
        clear()
        metrics = backward(i)
        bad = _bad(metrics)
        grown = [name for name, p in parameters if p.grad is not None and not _finite(p.grad)]
        clear()
        if bad:
            return Cause(", ".join(bad), i)
        if grown:
            return Cause(f"the gradient of {grown[0]}", i)
    return Cause("the sum over all sequences, each of which is finite alone")


def _bad(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that forbid a step."""
    return [name for name in metrics if name in DECISIVE and not math.isfinite(metrics[name])]


def _finite(tensor: Tensor) -> bool:
    return bool(whole(torch.isfinite(tensor).all()))
