"""Layers that torch compiles: traced here without a code generator, which `tests/gpu` has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from keel.engines.native import NativeEngine
from keel.engines.static import NoHostReads, StaticDecoder
from keel.models import families
from keel.models.attention import ATTENTION, _attention, compile_layers, install, uncompiled
from keel.models.loading import load_model
from keel.models.packed import pack
from keel.models.policy import Policy, frozen_copy, token_count
from keel.models.reference import critic_from_policy, reference_for
from keel.types import KeelError, Sampling
from tests.engines.tiny import TOKENIZER, assert_same, ragged_prompts, tiny
from tests.models.tiny import policy, spec

# torch hides this warning of its own, which pytest makes an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


COMPILE: Callable[..., None] = nn.Module.compile


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`Module.compile` without code of its own; no compiled code is left behind."""
    monkeypatch.setattr(nn.Module, "compile", lambda m, **k: COMPILE(m, backend="aot_eager", **k))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


RUNS: list[int] = []


def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Code as it is traced, which notes that it runs."""

    def run(*given: Any) -> Any:
        RUNS.append(1)
        return graph.forward(*given)

    return run


@pytest.mark.slow
def test_a_look_for_host_reads_leaves_compiled_code_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch skips what it compiled for good once it runs within a dispatch mode."""
    monkeypatch.setattr(nn.Module, "compile", lambda m, **k: COMPILE(m, backend=counting, **k))
    model = tiny("llama", dtype=torch.float32)
    install(model)
    setattr(model, families.COMPILED, "all")
    compile_layers(model.base_model)
    decoder = StaticDecoder(model, tokens=token_count(TOKENIZER), autocast=False)
    engine = NativeEngine(model, TOKENIZER, autocast=False, decoder=decoder)
    engine.sample(ragged_prompts(3), 2, Sampling(5), 0)
    with torch.no_grad():
        RUNS.clear()
        decoder._warm(4)
        wanted = len(RUNS)
        with uncompiled(decoder._weights.backbone), NoHostReads():  # type: ignore[no-untyped-call]
            decoder._warm(4)
        assert len(RUNS) == wanted > 0
        decoder._warm(4)
        assert len(RUNS) == 2 * wanted


def values_and_gradients(made: Policy, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, 8, (5 + i + seed,), generator=generator) for i in range(4)]
    packed = pack(sequences, [torch.arange(1, len(s)) for s in sequences], made.device)
    scores = made.scores(packed, entropy=True)
    assert scores.entropy_N is not None
    total = scores.log_prob_N.sum() + scores.entropy_N.sum()
    learned = [*made.trainable().values()]
    return [scores.log_prob_N.detach(), *torch.autograd.grad(total, learned)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rank", "checkpointing"),
    [("qwen2", 4, False), ("gemma2", 0, False), ("llama", 0, True)],
)
def test_compiled_layers_give_the_same_gradients(
    family: str, rank: int, checkpointing: bool
) -> None:
    """Layers share code, and batches of other sizes need none of their own."""
    made = policy(family, rank=rank, activation_checkpointing=checkpointing)
    wanted = [values_and_gradients(made, seed) for seed in range(3)]
    compile_layers(made.model.base_model)
    found, counts = [], []
    for seed in range(3):
        found.append(values_and_gradients(made, seed))
        counts.append(graphs())
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # sums in another order
    assert counts[0] == counts[-1] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3_text"])
def test_compiled_decoding_samples_the_same(family: str) -> None:
    """Prompts and steps share code, whatever the number of rows down to one."""
    model = tiny(family, dtype=torch.float32)
    engines = []
    for compiled in (False, True):
        own = copy.deepcopy(model)
        install(own)
        if compiled:
            setattr(own, families.COMPILED, "all")
            compile_layers(own.base_model)
        decoder = StaticDecoder(own, tokens=token_count(TOKENIZER), autocast=False, steps=4)
        engines.append(NativeEngine(own, TOKENIZER, autocast=False, decoder=decoder))
    counts = []
    for number in (9, 5, 2):
        asked = ragged_prompts(number)
        one, other = (engine.sample(asked, 2, Sampling(12), number) for engine in engines)
        assert_same(one, other, atol=1e-5)
        counts.append(graphs())
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("parts", ["nothing", "decoding", "all"])
def test_copies_are_compiled_as_their_model_says(parts: str) -> None:
    """The weights that sample under autocast, a reference and a critic; not those that sample while
    the policy learns."""
    made = policy("llama")
    setattr(made.model, families.COMPILED, parts)
    decoder = StaticDecoder(made.model, tokens=made.tokens, dtype=torch.bfloat16)
    ahead = StaticDecoder(frozen_copy(made.model), tokens=made.tokens, dtype=torch.bfloat16)
    reference: Any = reference_for(made)
    backbones = {
        "decoding": decoder._weights.backbone,
        "reference": reference.model.base_model,
        "critic": critic_from_policy(made).backbone,
        "ahead": ahead._weights.backbone,
    }
    found = set()
    for name, backbone in backbones.items():
        layers = [*backbone.layers, backbone.norm]  # type: ignore[union-attr, misc]
        compiled = {m._compiled_call_impl is not None for m in layers}
        assert len(compiled) == 1
        found |= {name} if compiled.pop() else set()
    wanted = {"all": {"decoding", "reference", "critic"}, "decoding": {"decoding"}}
    assert found == wanted.get(parts, set())
    assert decoder._weights.compiled == (parts != "nothing")


@pytest.mark.parametrize("choice", [True, False, "auto"])
def test_a_model_on_a_cpu_is_not_compiled(choice: bool | str) -> None:
    made = load_model(spec("llama", compile=choice), 0)
    assert families.compiled_parts(made) == "nothing"


@pytest.mark.parametrize(
    ("choice", "size", "quantised", "wanted"),
    [
        ("auto", 100, False, "decoding"),
        ("auto", 99, False, "nothing"),
        (True, 1, False, "all"),
        (False, 100, False, "nothing"),
        (True, 100, True, "nothing"),
        ("auto", 100, True, "nothing"),
    ],
)
def test_large_models_on_a_gpu_are_compiled(
    choice: bool | str, size: int, quantised: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not those in 4 bits."""
    monkeypatch.setattr(families, "has_triton", lambda: True)

    class OnGpu:
        device = torch.device("cuda")

        def parameters(self) -> list[Tensor]:
            return [torch.empty(size, 1_000_000, device="meta")]

    model: Any = OnGpu()
    keys = {"quantisation": "nf4", "rank": 2} if quantised else {}
    families.note_choices(model, spec("llama", compile=choice, **keys))
    assert families.compiled_parts(model) == wanted


def test_compiling_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "has_triton", lambda: False)
    model: Any = SimpleNamespace(device=torch.device("cuda"), parameters=lambda: [])
    families.note_choices(model, spec("llama"))
    assert families.compiled_parts(model) == "nothing"
    with pytest.raises(KeelError, match="needs Triton"):
        families.note_choices(model, spec("llama", compile=True))
