"""The model families whose packed forward pass is correct, and the check of that at load time.

A family is a transformers model type. Others are refused: some have no attention interface (Bloom,
Falcon, MPT), in others state leaks from one packed sequence into the next (Mamba, RWKV and other
recurrent layers).

Architectures differ in ways that no config shows, and a wrong one would train without an error. So
a few short sequences go through the model as transformers made it, one by one, and once through the
packed path and the head; a model whose logits differ is refused (`prepare`).

Both compute in float32, whatever the recipe's autocast: in bfloat16, rounding alone moves the
logits of a deep trained model by a tenth of the largest. bfloat16 weights become float32 one module
at a time, so that no float32 copy of a large model is made. A model that works in bfloat16 attends
by other kernels then; a second pass compares how far it and the stock model are from float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from keel.config.model import Autocast, Model
from keel.models.attention import Attending, PackedLayout, compile_layers, install
from keel.models.head import Head, logits
from keel.models.kernels import has_triton
from keel.models.packed import Packed, pack
from keel.types import KeelError


@dataclass(frozen=True)
class Family:
    """What a built model of the family needs beyond the common keys of its config."""

    gated: bool = True
    """A gated MLP (SwiGLU and the like), which is two thirds as wide at equal size."""
    width: str = "intermediate_size"
    """Config key of the MLP's width."""
    experts: bool = False


_DENSE = """
cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 granite hunyuan_v1_dense llama
ministral mistral olmo olmo2 olmo3 phi3 qwen2 qwen3 seed_oss smollm3
"""
_UNGATED = "arcee gpt_neox phi starcoder2"
_SPARSE = "gpt_oss mixtral olmoe qwen2_moe qwen3_moe"

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_DENSE.split(), Family()),
    **dict.fromkeys(_UNGATED.split(), Family(gated=False)),
    **dict.fromkeys(_SPARSE.split(), Family(experts=True)),
    "gpt2": Family(gated=False, width="n_inner"),
    "gpt_bigcode": Family(gated=False, width="n_inner"),
    "opt": Family(gated=False, width="ffn_dim"),
}
"""Model types whose packed forward pass was found equal to the separate one."""

SHIFTING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence of the batch."""

LENGTHS = (7, 19, 12)
"""Tokens of the probe's sequences: ragged, the longest in the middle."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest difference allowed, relative to the largest logit.

Another order of rounding moves float32 logits by about 1e-6; leaks between sequences by 1e-2 and
more. Some stock models take their softmax in float32 also for float64 weights.
"""

TF32_TOLERANCE = 1e-2
"""The same if the user allows products in TF32, which keep 11 bits."""

FURTHER = 3.0
"""How many times the stock model's mean distance from float32 is allowed in bfloat16.

Both distances are rounding alone and nearly equal; means, since rounding may choose another expert
of a sparse model for a single token.
"""

HEAD_DTYPE = "keel_head_dtype"
"""The attribute of a model that says what its head's products are rounded to."""
Compiled = Literal["nothing", "decoding", "all"]
COMPILED = "keel_compiled"
"""The attribute of a model that says what of it is compiled."""
WORTH_COMPILING = 100_000_000
"""Parameters from which on a run is likely to earn back the seconds that compiling takes."""

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def check_family(config: PreTrainedConfig, trusted: bool = False) -> None:
    """Raise KeelError for a family that is not listed, or a config that cannot be packed.

    With `trusted` (code that the user chose to trust) the probe decides on unlisted families.
    """
    family = config.model_type
    if family not in FAMILIES and not trusted:
        raise KeelError(
            f"model family {family!r} is not supported: use one of {', '.join(sorted(FAMILIES))}"
        )
    _check_sizes(config)
    for rope in _rope_types(config):
        if rope in SHIFTING_ROPE:
            raise KeelError(
                f"model family {family!r} with rope_type {rope!r}: a long sequence would change "
                "the positions of its neighbours in a packed batch; use a checkpoint whose "
                "rope_parameters are of type default, linear, llama3 or yarn"
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise KeelError(
            f"model family {family!r} with use_bidirectional_attention is no causal language "
            "model: load a checkpoint without that key"
        )


def _check_sizes(config: PreTrainedConfig) -> None:
    """Raise KeelError for impossible sizes, with which transformers would fail later."""
    for key in SIZES:
        value = getattr(config, key, None)
        if isinstance(value, int) and value < 1:
            raise KeelError(f"the model's config has {key} = {value}: it must be 1 or more")
    ids = getattr(config, "eos_token_id", None)
    for token in ids if isinstance(ids, list) else [ids]:
        # A family's default may lie outside the vocabulary; the tokenizer's replaces it.
        if isinstance(token, int) and not 0 <= token < 2**31:
            raise KeelError(
                f"the model's config has eos_token_id = {token}, which is no token: give one from "
                f"0 to {config.vocab_size - 1}, or leave it out"
            )
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        per_head = config.hidden_size // config.num_attention_heads
        per_head = getattr(config, "head_dim", None) or per_head
        turned = int(per_head * rope.get("partial_rotary_factor", 1.0))
        if turned < 2 or turned % 2:
            raise KeelError(
                f"the model's config rotates {turned} features of each attention head, which must "
                "be even and at least 2: change hidden_size, or the number of heads"
            )


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """The rope types of a config, which holds one set of parameters or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [str(entry["rope_type"]) for entry in sets if "rope_type" in entry]


def context_length(model: PreTrainedModel) -> int | None:
    """How many tokens a sequence may have; None where the model has no limit."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def head_of(model: PreTrainedModel) -> Head:
    """How a model's logits are made from the hidden states of its backbone.

    Scale and soft cap are read from the config: Gemma 2 and 3 `final_logit_softcapping`, Granite
    `1 / logits_scaling`, Cohere `logit_scale`. Raises KeelError for a model without an output
    layer.
    """
    layer = model.get_output_embeddings()
    if layer is None or not hasattr(layer, "weight"):
        raise KeelError(
            f"model family {model.config.model_type!r} has no output layer: "
            "use a causal language model"
        )
    config = model.config
    scale = 1.0
    if config.model_type == "granite":
        scale = 1.0 / config.logits_scaling
    elif config.model_type in ("cohere", "cohere2"):
        scale = float(config.logit_scale)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(
        weight=layer.weight,
        bias=getattr(layer, "bias", None),
        scale=scale,
        softcap=softcap,
        dtype=getattr(model, HEAD_DTYPE, "float32"),
    )


def note_choices(model: PreTrainedModel, spec: Model) -> None:
    """Note on a model, which is on its device, what the recipe says of its head and of compiling,
    for it and for its copies."""
    exact = spec.head_dtype == "auto" and spec.autocast is False
    setattr(model, HEAD_DTYPE, "float32" if exact else spec.head_dtype)
    compiled: Compiled = "nothing"
    if spec.compile and model.device.type == "cuda" and spec.quantisation is None:
        large = sum(p.numel() for p in model.parameters()) >= WORTH_COMPILING
        if spec.compile is True and not has_triton():
            raise KeelError("model.compile = true needs Triton: pip install triton, or set false")
        if spec.compile is True:
            compiled = "all"
        elif large and has_triton() and torch.version.hip is None:
            compiled = "decoding"
    setattr(model, COMPILED, compiled)


def compiled_parts(model: PreTrainedModel) -> Compiled:
    """What of a model is to be compiled."""
    found: Compiled = getattr(model, COMPILED, "nothing")
    return found


def compile_again(model: PreTrainedModel) -> None:
    """Compile the layers of a model that is to be compiled, after they changed or were copied."""
    if compiled_parts(model) == "all":
        compile_layers(model.base_model)


def uses_autocast(model: PreTrainedModel, wanted: Autocast) -> bool:
    """Whether the model works in bfloat16 autocast: float32 weights on a GPU (but MPS), or on a CPU
    where `wanted` names bfloat16 (`auto` is settled at the start of a run: `keel.models.policy`)"""
    kind = model.device.type
    on = wanted == "bfloat16" if kind == "cpu" else bool(wanted) and kind != "mps"
    return on and model.dtype == torch.float32


def autocast_for(model: PreTrainedModel, wanted: Autocast) -> torch.autocast:
    """bfloat16 autocast where `uses_autocast`; elsewhere no effect."""
    enabled = uses_autocast(model, wanted)
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=enabled)


def hidden_states(
    model: PreTrainedModel, packed: Packed, autocast: Autocast = True
) -> Float[Tensor, "N H"]:
    """The last hidden state that each scored token is predicted from, at `source_N`."""
    fed, at_N = packed.fed
    return states_at(model, fed, at_N, autocast)


def states_at(
    model: PreTrainedModel, packed: Packed, at_K: Int[Tensor, " K"], autocast: Autocast = True
) -> Float[Tensor, "K H"]:
    """The last hidden states at these indices among the T.

    `model` is a causal language model, one with a classification head, or their backbone, with
    packed attention. No cache is used: transformers' own would let sequences see each other.
    """
    backbone: nn.Module = model.base_model
    with autocast_for(model, autocast):
        out = backbone(
            input_ids=packed.tokens_T[None],
            position_ids=packed.positions()[None],
            use_cache=False,
            layout=Attending(PackedLayout(packed.lengths, packed.follows)),
        )
    states: Tensor = out.last_hidden_state[0]
    return states.index_select(0, at_K)


# ---------------------------------------------------------------- the packing probe


Output = Literal["logits", "hidden states"]


@torch.no_grad()
def prepare(model: PreTrainedModel, autocast: Autocast, what: Output = "logits") -> None:
    """Give a stock model packed attention, and refuse it if that changes `what` it computes.

    Of a model without a language head the hidden states are compared. Raises KeelError with the
    family's name and the largest difference.
    """
    family = model.config.model_type
    sequences = probe_sequences(model)
    rounds = model.dtype == torch.bfloat16 or uses_autocast(model, autocast)
    model.eval()
    with exact_weights(model):
        exact = stock_outputs(model, sequences, False, what)
    rounded = stock_outputs(model, sequences, autocast, what) if rounds else exact
    install(model)
    # In training mode, in which it will be used: what that mode changes is a fault too.
    model.train()
    try:
        with exact_weights(model):
            ours = _packed(model, sequences, False, what)
        ours_rounded = _packed(model, sequences, autocast, what) if rounds else exact
    except (ValueError, TypeError, RuntimeError) as error:
        raise KeelError(
            f"model family {family!r} cannot run packed sequences "
            f"({str(error).splitlines()[0]}): choose a model of a supported family"
        ) from error
    difference = float((ours - exact).abs().max() / exact.abs().max().clamp_min(1e-12))
    tolerance, fault = TOLERANCE[exact.dtype], None
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        tolerance = TF32_TOLERANCE
    # Not `>`, which a NaN would pass.
    if not difference <= tolerance:
        fault = f"from separate ones by {difference:.2g} of the largest (allowed {tolerance:.0e})"
    else:
        far, stock_far = (float((x - exact).abs().mean()) for x in (ours_rounded, rounded))
        if not far <= FURTHER * stock_far:
            fault = f"in bfloat16 from float32's by {far:.2g}, and separate ones by {stock_far:.2g}"
    if fault is not None:
        raise KeelError(
            f"model family {family!r} fails the packing probe: the {what} of packed sequences "
            f"differ {fault}; this model would train on wrong probabilities: choose another"
        )
    compile_again(model)


@contextmanager
def exact_weights(model: PreTrainedModel) -> Iterator[None]:
    """Within the block a module's bfloat16 weights are float32 while it runs."""
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.bfloat16:
                kept[parameter], parameter.data = parameter.data, parameter.data.float()

    def restore(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = kept.pop(parameter, parameter.data)

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(widen))
            hooks.enter_context(module.register_forward_hook(restore, always_call=True))
        yield


def probe_sequences(model: PreTrainedModel) -> list[Tensor]:
    """Random token ids, the same at every call, no longer than the model's context."""
    context = getattr(model.config, "max_position_embeddings", None) or max(LENGTHS)
    words = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, words, (min(length, context),), generator=generator).to(model.device)
        for length in LENGTHS
    ]


def stock_outputs(
    model: PreTrainedModel, sequences: list[Tensor], autocast: Autocast, what: Output
) -> Tensor:
    """Logits or hidden states of every position, one sequence at a time."""
    module = model if what == "logits" else model.base_model
    field = "logits" if what == "logits" else "last_hidden_state"
    with autocast_for(model, autocast):
        outputs = [module(input_ids=tokens[None], use_cache=False) for tokens in sequences]
    return torch.cat([getattr(out, field)[0] for out in outputs])


def _packed(
    model: PreTrainedModel, sequences: list[Tensor], autocast: Autocast, what: Output
) -> Tensor:
    """The same of the packed path."""
    packed = pack(sequences, [torch.zeros(0, dtype=torch.long)] * len(sequences), model.device)
    everywhere = torch.arange(len(packed.tokens_T), device=model.device)
    states = states_at(model, packed, everywhere, autocast)
    exact = replace(head_of(model), dtype="float32") if what == "logits" else None
    return states if exact is None else logits(states, exact)
