"""What the formulas state, in Python: the loss is compared with it.

Over `rho`, `A`, `log_prob`, `d` (the log-ratio to the other policy), `V`, `V_old`, `R` (return),
`S`, `N`, `L` (the completion's length) and `omega` (the correction's ratio).
"""

from __future__ import annotations

from typing import Any

from keel.algorithms.spec import Algorithm

FROM_NEW = {"k1": "d", "k2": "0.5*d**2", "k3": "exp(-d) + d - 1", "abs": "abs(d)"}
FROM_OLD = FROM_NEW | {"k1": "-d", "k3": "exp(d) - d - 1"}
WEIGHED_FROM_OLD = {
    "k1": "rho*d",
    "k2": "rho*0.5*d**2",
    "k3": "rho*d - (rho - 1)",
    "abs": "rho*abs(d)",
}
WEIGHTS = {
    "sequence_mean": "1/(S*L)",
    "token_mean": "1/N",
    "constant": "1/(S*512)",
    "sequence_sum": "1/S",
}


def surrogate(algorithm: Algorithm) -> str:
    """s of a token."""
    s: Any = algorithm.surrogate
    if s.kind == "clip":
        formula = f"min(rho*A, clip(rho, {1 - s.low!r}, {1 + s.high!r})*A)"
        return formula if s.dual is None else f"max({formula}, {s.dual!r}*min(A, 0))"
    if s.kind == "cispo":
        return f"clip(rho, {s.floor!r}, {s.cap!r})*A*log_prob"
    if s.kind == "sapo":
        tau = f"where(A > 0, {s.temperature_positive!r}, {s.temperature_negative!r})"
        return f"4/{tau}*sigmoid({tau}*(rho - 1))*A"
    if s.kind == "geometric":
        clipped = f"sign(A)*clip(log(rho), {-s.low!r}, {s.high!r})"
        return f"A*exp(mean(sign(A)*min(sign(A)*log(rho), {clipped})))"
    return {"unclipped": "rho*A", "log_prob": "A*log_prob"}[s.kind]


def divergence(algorithm: Algorithm) -> str:
    """D of a token."""
    d = algorithm.divergence
    assert d is not None
    if d.where == "loss" and d.to == "old":
        return (WEIGHED_FROM_OLD if d.unbiased else FROM_OLD)[d.estimator]
    weighed = d.where == "loss" and d.unbiased
    return f"rho*({FROM_NEW[d.estimator]})" if weighed else FROM_NEW[d.estimator]


def value_loss(algorithm: Algorithm) -> str:
    """The loss of a value, with its coefficient."""
    v = algorithm.value
    assert v is not None
    squared = "(V - R)**2"
    if v.clip is not None:
        near = f"clip(V, V_old - {v.clip!r}, V_old + {v.clip!r})"
        squared = f"max({squared}, ({near} - R)**2)"
    return f"{v.coefficient!r}*0.5*{squared}"


def correction(algorithm: Algorithm) -> str:
    """c of a token."""
    c = algorithm.correction
    assert c is not None
    if c.kind == "truncate":
        return f"min(omega, {c.cap!r})"
    return f"where((omega >= {c.floor!r}) & (omega <= {c.cap!r}), omega, 0)"
