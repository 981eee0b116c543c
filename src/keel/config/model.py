"""The keys that all stages share: which models, and the processes that they run on. Torch-free."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from keel.algorithms.terms import AsTuple, FrozenModel, Positive, Share, Teacher, Unit, UnusedIf
from keel.config.fields import Count, Depth, Seconds, Tokens, Width, Words
from keel.config.secrets import wrong_key_name

NO_CONVERSATION = UnusedIf(
    lambda key: key.facts.conversations is False,
    "no prompt is a conversation, so no chat template is used",
)
_BUILT = UnusedIf(lambda key: key.table.build is not None, "the model is built, not loaded")
_LOCAL = UnusedIf(lambda key: key.facts.local, "model.name is a folder, which has no revisions")
_ON_CPU = UnusedIf(
    lambda key: key.facts.cpu and isinstance(key.value, bool),
    'a CPU computes in float32 unless it is "auto" or "bfloat16"',
)
_HEAD_ON_CPU = UnusedIf(
    lambda key: key.facts.cpu and key.value != "bfloat16",
    'a CPU computes the output layer in float32 unless it is "bfloat16"',
)
_NOT_COMPILED = UnusedIf(lambda key: key.facts.cpu, "a CPU runs its own compiled code")
_NOT_FLOAT32 = UnusedIf(
    lambda key: key.table.dtype != "float32", 'autocast is for model.dtype = "float32" only'
)
SAME_DTYPE = UnusedIf(lambda key: key.value == key.recipe.model.dtype, "it equals model.dtype")
_BYTES = UnusedIf(lambda key: key.table.tokenizer == "bytes", "bytes need no alphabet")
_NO_KV_HEADS = UnusedIf(
    lambda key: not key.facts.kv_heads, "{key.table.family} has no separate key-value heads"
)
_ONE_PROCESS = UnusedIf(
    lambda key: key.table.processes == 1, "with one process no weights are sharded"
)
_NOTHING_TO_OFFLOAD = UnusedIf(
    lambda key: key.facts.cpu, "the models are on a CPU, in the machine's memory already"
)
_NO_RAY = UnusedIf(lambda key: key.table.ray is None, "cluster.ray is not set")
_OF_ADAPTER = UnusedIf(
    lambda key: key.table.adapter is not None, "lora.adapter is set, and has its own"
)
_ALONE = UnusedIf(
    lambda key: key.table.ray is None and key.table.processes == 1, "there is one process"
)

_NO_ALERTS = UnusedIf(
    lambda key: not key.table.active, "neither alerts.command nor alerts.webhook_env is set"
)


def _layers(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
    """One message under one key, whichever type the value is not."""
    try:
        return known(value)
    except ValidationError:
        raise ValueError("true, false, or a number of layers from 1") from None


Autocast = bool | Literal["auto", "bfloat16"]
"""A value of `model.autocast`."""

HeadDtype = Literal["auto", "float32", "tf32", "bfloat16"]
"""A value of `model.head_dtype`."""


class BuildModel(FrozenModel):
    """A small random model from a transformers config, with a new tokenizer."""

    family: str = "llama"
    """Model type of transformers: llama, qwen2, qwen3, gpt2, …"""
    tokenizer: Literal["characters", "bytes"] = "characters"
    """One token per character of `alphabet`, or per byte."""
    alphabet: Annotated[str, _BYTES] = (
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=()[]<>,.:;!?'\"\n"
    )
    """The characters of a `characters` tokenizer."""
    hidden_size: Width = 128
    """Width of the hidden states."""
    layers: Depth = 4
    """Number of layers."""
    heads: Depth = 4
    """Attention heads."""
    kv_heads: Annotated[Depth | None, _NO_KV_HEADS] = None
    """Key-value heads; None: as many as `heads`."""
    intermediate_size: Width | None = None
    """Width of the MLP; None: four times the hidden size, or 8/3 for gated families."""
    context: Tokens = 256
    """Longest sequence, in tokens."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the family's transformers config."""


class Lora(FrozenModel):
    """Low-rank adapters (peft); the reference policy is then the base with the adapter off."""

    adapter: str | None = None
    """Folder or hub name of a peft adapter to go on from, with its own rank and targets. The
    reference policy is then the base with it."""
    rank: Annotated[Width, _OF_ADAPTER] = 16
    """Rank of the adapters."""
    alpha: Annotated[Positive, _OF_ADAPTER] = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...] | Literal["all-linear"], AsTuple, _OF_ADAPTER] = "all-linear"
    """Names of the modules with adapters, as in peft."""
    rslora: Annotated[bool, _OF_ADAPTER] = False
    """Scale by alpha / √rank instead (arXiv:2312.03732)."""
    dora: Annotated[bool, _OF_ADAPTER] = False
    """Learn the norm of each weight row apart from its direction (DoRA, arXiv:2402.09353)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs dropped, in optimizer steps only: importance ratios are noisy if
    a batch takes several steps, and the result depends on `token_budget`."""
    modules_to_save: Annotated[Words, _OF_ADAPTER] = ()
    """Modules that are trained as a whole, such as embed_tokens and lm_head (tied: both)."""

    def unlike_plain(self, *but: str) -> str | None:
        """A key that makes it more than plain low-rank adapters, without those of `but`."""
        keys = ("dora", "modules_to_save", "adapter", "dropout")
        return next((key for key in keys if key not in but and getattr(self, key)), None)


class Model(FrozenModel):
    """Which policy: `name` (a local folder or a hub name) or `build`."""

    name: str | None = None
    """A local folder or a hub name."""
    revision: Annotated[str | None, _LOCAL, _BUILT] = None
    """Branch, tag or commit on the hub."""
    build: BuildModel | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the master weights. bfloat16 weights hardly change at small learning rates."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """`auto` is CUDA if there is a GPU, else the CPU; `mps`, a Mac's GPU, is untested."""
    autocast: Annotated[Autocast, _ON_CPU, _NOT_FLOAT32] = True
    """Compute in bfloat16 on a GPU; weights, log-probabilities and losses stay in float32. On a CPU
    only with `bfloat16`, or `auto` if it is faster there."""
    head_dtype: Annotated[HeadDtype, _HEAD_ON_CPU] = "auto"
    """Rounding of the factors of the output layer's products on a GPU; sums stay in float32.
    `auto`: `tf32` in updates, `bfloat16` in decoding, `float32` with `autocast = false`."""
    compile: Annotated[bool | Literal["auto"], _NOT_COMPILED] = "auto"
    """Let torch.compile join the small kernels of each layer on an NVIDIA GPU. `auto`: in decoding,
    for models of at least 100 million parameters; `true`: in updates and scoring, too."""
    trust_remote_code: Annotated[bool, _BUILT] = False
    """Run Python code that comes with the model."""
    activation_checkpointing: Annotated[bool | Depth, WrapValidator(_layers)] = False
    """Recompute activations in the backward pass; a number: of that many layers, from the first."""
    lora: Lora | None = None
    quantisation: Literal["nf4"] | None = None
    """Keep the linear layers below an adapter in 4 bits (QLoRA, arXiv:2305.14314; bitsandbytes)."""
    chat_template: Annotated[str | None, NO_CONVERSATION] = None
    """A Jinja template for a tokenizer that has none."""

    @model_validator(mode="after")
    def _frozen_base(self) -> Model:
        if self.quantisation is not None and self.lora is None:
            raise ValueError(
                f"model.quantisation = {self.quantisation!r} is for frozen weights below an "
                "adapter, since 4 bits cannot take a step: set model.lora"
            )
        if self.quantisation is not None and self.dtype == "float64":
            raise ValueError(
                f"model.quantisation = {self.quantisation!r} has no float64: set model.dtype to "
                '"bfloat16" or "float32"'
            )
        return self

    @model_validator(mode="after")
    def _compiled_adapter(self) -> Model:
        key = None if self.lora is None else self.lora.unlike_plain("modules_to_save", "adapter")
        if self.compile is True and key is not None:
            raise ValueError(
                f"model.lora.{key} does not go with model.compile = true, which is untested with "
                'it: set model.compile to "auto"'
            )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.name is None) == (self.build is None):
            raise ValueError("set exactly one of model.name (a folder or hub name) and model.build")
        return self


_ANOTHER = UnusedIf(lambda key: key.table.name is not None, "teacher.name is another model")
_OWN = UnusedIf(lambda key: key.table.name is None, "the teacher is the policy itself")
_SERVED = UnusedIf(lambda key: key.table.url is not None, "the server has loaded the teacher")
_NO_SERVER = UnusedIf(lambda key: key.table.url is None, "teacher.url is not set")
_NOT_AVERAGED = UnusedIf(lambda key: not key.table.averaged, "the teacher is not an average")


class TaskTeacher(FrozenModel):
    """The teacher of one task."""

    task: str
    """As rollouts and metrics name it: that of a file `code.jsonl` is `jsonl:code`."""
    name: str
    """Folder or hub name; with `url`, its name on the server."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""


class TeacherModel(FrozenModel):
    """The teacher of a distillation: another model, or the policy itself, which is shown more."""

    name: str | None = None
    """Folder or hub name of a causal language model with the policy's tokenizer; None: the policy,
    with a `prompt` of its own. With `url`, its name on the server."""
    by_task: Annotated[tuple[TaskTeacher, ...], AsTuple] = ()
    """Other teachers of single tasks; the keys besides these are theirs too."""
    url: str | None = None
    """Base address of a vLLM server that scores the completions, such as http://localhost:8001/v1:
    no teacher is loaded, and `distillation.place` is "advantage"."""
    api_key_env: Annotated[str | None, _NO_SERVER] = None
    """Name of the environment variable whose value is sent as a bearer token."""
    timeout: Annotated[Seconds, _NO_SERVER] = 120.0
    """Seconds for one request, which has one completion."""
    retries: Annotated[int, Field(ge=0, le=100), _NO_SERVER] = 5
    """How often a request is sent again that got no answer, or a status of 408, 425, 429 or 500 and
    above."""
    requests: Annotated[Count, _NO_SERVER] = 32
    """Requests at once at the most."""
    weights: Annotated[Literal["live", "base", "averaged"], _ANOTHER] = "base"
    """The policy's own: as they are, as they were before the stage, or their moving average."""
    rate: Annotated[Share, _NOT_AVERAGED] = 0.05
    """Share of the policy's weights that each step puts into the average."""
    prompt: str | None = None
    """What the teacher reads for the text of the prompt (of its last message): columns of the
    prompt, and of the completion if a program returned some, in braces."""
    revision: Annotated[str | None, _OWN, _SERVED] = None
    """Branch, tag or commit on the hub."""
    dtype: Annotated[Literal["model", "bfloat16"], SAME_DTYPE, _OWN, _SERVED] = "model"
    """Of its weights; `model` is `model.dtype`."""

    @property
    def where(self) -> Teacher:
        """Whether it is a model that is loaded, one on a server, or the policy itself, and how."""
        if self.name is None:
            return self.weights
        if self.url is not None:
            return "server"
        return "models" if self.by_task else "model"

    @property
    def each(self) -> Mapping[str, TeacherModel]:
        """The teacher and those of single tasks, by the key of their name."""
        others = {
            f"teacher.by_task.{at}.name": {"name": one.name, "revision": one.revision}
            for at, one in enumerate(self.by_task)
        }
        own = {"teacher.name": {"name": self.name}, **others}
        return {key: self.model_copy(update={"by_task": (), **which}) for key, which in own.items()}

    def of_task(self, task: str) -> int:
        """The place of a task's teacher in `each`."""
        return 1 + [one.task for one in self.by_task].index(task) if task in self.tasks else 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those that have teachers of their own."""
        return tuple(one.task for one in self.by_task)

    @property
    def averaged(self) -> bool:
        """Whether it is a moving average of the policy."""
        return self.name is None and self.weights == "averaged"

    @property
    def kept(self) -> bool:
        """Whether it is kept as a reference policy is: a copy, or an adapter."""
        return self.name is None and self.weights != "live"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `prompt` names."""
        try:
            parts = [*string.Formatter().parse(self.prompt or "")]
        except ValueError as error:
            raise ValueError(f"teacher.prompt: {error}: write {{{{ and }}}} for braces") from error
        return tuple(name for _, name, _, _ in parts if name is not None)

    @model_validator(mode="after")
    def _differs(self) -> TeacherModel:
        if self.url is not None and self.name is None:
            raise ValueError(
                f"teacher.url = {self.url!r} is a server, which may have several models: set "
                "teacher.name to the name that it has there"
            )
        if self.api_key_env is not None and (reason := wrong_key_name(self.api_key_env)):
            raise ValueError(f"teacher.{reason}")
        if wrong := [name for name in self.columns if not name.isidentifier()]:
            raise ValueError(
                f"teacher.prompt: {{{wrong[0]}}} is not the name of a column: write {{{{ and }}}} "
                "for braces of the text"
            )
        if self.name is None and self.by_task:
            raise ValueError(
                "teacher.by_task has the teachers of single tasks: set teacher.name to that of all "
                "others"
            )
        if len({*self.tasks}) < len(self.tasks):
            raise ValueError("teacher.by_task names a task twice: leave one of them out")
        if self.name is None and self.prompt is None:
            raise ValueError(
                "the teacher is the policy itself and reads the same prompt: set teacher.prompt to "
                'show it more ("{prompt}\\n\\n{answer}"), or teacher.name to another model'
            )
        return self


class BaseModelChoice(FrozenModel):
    """What a reward model's backbone starts from."""

    name: str | None = None
    """Folder or hub name of a causal language model; None: the policy as it is before the stage."""
    stage: str | None = None
    """Name of an earlier stage of the same kind; its reward model is trained further, head
    included."""
    lora: Lora | None = None
    """Adapters on a frozen backbone; the head is always trained."""
    replay: Unit = 0.0
    """Share of the train rows of the model's earlier stages that are added to the stage's own."""

    @model_validator(mode="after")
    def _one_base(self) -> BaseModelChoice:
        if self.name is not None and self.stage is not None:
            raise ValueError("set one of base.name (a model) and base.stage (an earlier stage)")
        if self.lora is not None and self.lora.adapter is not None:
            raise ValueError("base.lora.adapter: only model.lora goes on from an adapter: drop it")
        if self.replay and self.stage is None:
            raise ValueError(
                f"base.replay = {self.replay:g} is of the rows of an earlier stage: set base.stage"
            )
        return self


class Cluster(FrozenModel):
    """The processes that a recipe runs on."""

    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that share stages of kind rl: each trains on some of the sequences with a part of
    the weights (FSDP2); without Ray on this machine, sampling with the native engine."""
    offload: Annotated[Literal["none", "cpu"], _ONE_PROCESS, _NOTHING_TO_OFFLOAD] = "none"
    """`cpu`: each GPU's share of weights, gradients and moments stays on the host, where the
    optimizer steps."""
    ray: str | None = None
    """Ray runs the processes: a cluster's address (`auto`, or HOST:PORT), or `local`, started on
    this machine ([how to](howto/ray.md))."""
    rollout_workers: Annotated[int, Field(ge=1, le=1024), _NO_RAY] = 1
    """Processes that sample, each with the whole model and an engine of its own."""
    reward_workers: Annotated[int, Field(ge=0, le=1024), _NO_RAY] = 0
    """Processes that rewards run in; 0: the process of the loop, where judges and tasks' own scores
    always run."""
    cpus: Annotated[float, Field(gt=0, le=1024), _NO_RAY] = 1.0
    """CPUs that Ray reserves for each process; it has as many threads."""
    gpus: Annotated[float, Field(ge=0, le=16), _NO_RAY] = 0.0
    """GPUs that Ray reserves for each process that trains or samples."""
    reward_gpus: Annotated[float, Field(ge=0, le=16), _NO_RAY] = 0.0
    """GPUs that Ray reserves for each reward worker."""
    deadline: Annotated[Seconds, _ALONE] = 1800.0
    """Seconds in which a process has to answer a call; else a worker is replaced and its work
    repeated, a trainer or rank counts as lost."""
    restarts: Annotated[int, Field(ge=0, le=1000), _NO_RAY] = 3
    """How often in a row the run restarts from one checkpoint after a trainer was lost."""


class Alerts(FrozenModel):
    """What is called with JSON at diagnoses and at the run's end ([how to](howto/tracking.md))."""

    command: Words = ()
    """A program and its arguments; the JSON is its standard input."""
    webhook_env: str | None = None
    """The environment variable with the URL to which the JSON is posted."""
    on: Annotated[Literal["all"] | Words, _NO_ALERTS] = "all"
    """`all`, or a list of conditions of `keel diagnose`, `finished`, `stopped` and `failed`."""

    @property
    def active(self) -> bool:
        """Whether anything is called."""
        return bool(self.command) or self.webhook_env is not None

    @model_validator(mode="after")
    def _no_secret(self) -> Alerts:
        name = self.webhook_env
        if name is not None and (reason := wrong_key_name(name, "webhook_env")):
            raise ValueError(reason)
        return self
