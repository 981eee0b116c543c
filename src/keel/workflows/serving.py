"""`keel serve` and `keel chat`: a run's policy or a model behind an endpoint, or to talk to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.engines.chat import Chat
from keel.engines.endpoint.server import CHAT, TEXT, Endpoint
from keel.engines.endpoint.serving import RequestBatcher
from keel.engines.native import NativeEngine
from keel.engines.sampler import check
from keel.models.chat import ChatEncoder
from keel.models.text import check_keywords
from keel.models.tokenizer_round_trip import quiet
from keel.platform.listen import listen, shown_token, token_for, url_of
from keel.training.export import policy_of, run_or_model
from keel.training.setup import templates_at
from keel.types import KeelError, Sampling

OF_CONFIG = ("temperature", "top_p", "top_k", "min_p")
"""What is taken over from a model's generation config."""
UNBOUNDED = 4096
"""Tokens of an answer of a model without a context length."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model to talk to. `sampling` is what its generation config says, else temperature 1, and
    its budget the model's context."""

    name: str
    engine: NativeEngine
    chat: ChatEncoder
    sampling: Sampling

    @property
    def has_template(self) -> bool:
        """Whether it takes conversations."""
        return bool(getattr(self.chat.tokenizer, "chat_template", None))


@contextmanager
def served_model(
    model: Path | str,
    *,
    checkpoint: str | None = None,
    device: str | None = None,
    max_num_seqs: int = 1,
    template: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Iterator[ServedModel]:
    """Load the policy of a run's checkpoint, or a model; chat templates get the run's time.

    `template` are keywords of the chat template, over those of the run's last stage; `changes` are
    of the sampling; None changes nothing. Raises KeelError.
    """
    recipe, folder = run_or_model(model)
    if folder is None and checkpoint is not None:
        raise KeelError(
            f"{model} is not a run folder, so it has no checkpoint {checkpoint!r}: drop "
            "--checkpoint"
        )
    with quiet():
        policy = policy_of(model, checkpoint or "last", device)
    engine = NativeEngine(
        policy.model, policy.tokenizer, max_num_seqs=max_num_seqs, autocast=policy.autocast
    )
    stages = [] if recipe is None else [one for one in recipe.stages if one.trains_policy]
    trained = stages[-1].prompt_keywords if stages else {}
    chat = ChatEncoder(policy.tokenizer, {**trained, **check_keywords(template or {})})
    config = getattr(policy.model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in OF_CONFIG}
    sampling = Sampling(policy.context or UNBOUNDED)
    for source in (found, changes):
        sampling = replace(sampling, **{k: v for k, v in source.items() if v is not None})
    check(sampling, 1)
    with templates_at(run=folder):
        yield ServedModel(Path(model).name, engine, chat, sampling)


def serve(
    model: Path | str,
    *,
    checkpoint: str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    max_num_seqs: int = 32,
    max_tokens: int | None = None,
    device: str | None = None,
    template: Mapping[str, Any] | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Answer requests in OpenAI's format until interrupted.

    `port` None takes 8765, or a free one if that is taken. On another host than the loopback a
    token is needed, the API key: a new one, or that of `KEEL_TOKEN`. `max_tokens` is the most that
    an answer may have; `template` as in `served_model`. Raises KeelError.
    """
    token, hosts = token_for(host)
    with (
        listen(host, port) as listener,
        served_model(
            model,
            checkpoint=checkpoint,
            device=device,
            max_num_seqs=max_num_seqs,
            max_tokens=max_tokens,
            template=template,
        ) as served,
    ):
        server = RequestBatcher(served.engine, served.chat, served.name, served.sampling)
        url = url_of(host, int(listener.getsockname()[1]))
        with Endpoint(
            server.submit, listener, model=served.name, served=True, token=token, hosts=hosts
        ):
            key = "" if token is None else f' -H "Authorization: Bearer {shown_token(token)}"'
            announce(f"keel serve: {served.name} at {url}/v1 (Ctrl-C stops it)")
            body = '{"prompt": "1 + 1 ="}'
            if served.has_template:
                body = '{"messages": [{"role": "user", "content": "What is 1 + 1?"}]}'
            path = CHAT if served.has_template else TEXT
            announce(f"curl {url}{path}{key} -d '{body}'")
            server.run()


@contextmanager
def conversation(
    model: Path | str,
    *,
    system: str = "",
    checkpoint: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> Iterator[tuple[ServedModel, Chat]]:
    """A model and a conversation with it. Raises KeelError."""
    with served_model(
        model,
        checkpoint=checkpoint,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        template=template,
    ) as served:
        if system and not served.has_template:
            raise KeelError(f"{model} has no chat template, so no system message: drop --system")
        with served.engine.conversation() as source:
            yield served, Chat(source, served.chat, served.sampling, system=system)
