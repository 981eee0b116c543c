"""A validation error as one line: the key, the value, and how to fix it.

A key of TRL or verl is greeted with the name that Keel has for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from keel.config.fields import nearest
from keel.config.layers import SHARED, stage_name
from keel.config.rl import RolloutStage
from keel.config.schema import Recipe

Location = tuple[int | str, ...]
SHOWN = 200
"""Characters of a wrong value that its error shows."""


def explain_validation(
    error: ValidationError, data: Mapping[str, Any], root: type[BaseModel] = Recipe
) -> str:
    """The first thing that is wrong with a `root`, as one line; unknown keys before all else."""
    details = error.errors(include_url=False)
    details.sort(key=lambda d: d["type"] != "extra_forbidden")
    first = details[0]
    where, model = _walk(first["loc"], data, root)
    if first["type"] == "extra_forbidden":
        return _unknown_key(where, model, first["input"], data)
    message = first["msg"].removeprefix("Value error, ")
    shown = f" = {_shown(first['input'])}" if isinstance(first["input"], str | int | float) else ""
    if first["type"] == "value_error" and where and message.startswith(f"{where}."):
        return message
    if first["type"] == "value_error":
        return f"{where}: {message}" if where else message
    if first["type"] == "union_tag_invalid":
        about = first["ctx"]
        key = ".".join(filter(None, [where, about["discriminator"].strip("'")]))
        return f"{key} = {about['tag']!r}: choose one of {about['expected_tags']}"
    if first["type"] in _TABLES and (how := _how_to_write(where, model)) is not None:
        return f"{where}{shown}: {how}"
    return f"{where}{shown}: {message[:1].lower()}{message[1:]}"


_TABLES = ("tuple_type", "model_type", "model_attributes_type", "dict_type")


def _how_to_write(where: str, model: type[BaseModel] | None) -> str | None:
    """How a key that holds a table, or a list of tables, is set; None for another key."""
    info = model.model_fields.get(where.rpartition(".")[2]) if model is not None else None
    inner = next(models_in(info), None) if info is not None else None
    if inner is None:
        return None
    key = f"{where}.{next(iter(inner.model_fields))}"
    return f"it holds keys of its own: set one of them, such as {key}"


def _shown(value: str | int | float) -> str:
    """A value as Python writes it, cut short."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _unknown_key(
    where: str, model: type[BaseModel] | None, value: Any, data: Mapping[str, Any]
) -> str:
    parent, _, leaf = where.rpartition(".")
    known = list(model.model_fields) if model else []
    if leaf == where:
        known += sorted(SHARED)
    meant = None
    if isinstance(value, Mapping):
        meant = _mistyped_table(leaf, value, parent, model, data)
        # verl's long paths: the last part says what is meant
        while isinstance(value, Mapping) and value:
            part, value = next(iter(value.items()))
            where, leaf = f"{where}.{part}", str(part)
    foreign = _foreign(where.split("."))
    if meant is not None and not (foreign and leaf in EXPLAINED):
        hint = f"did you mean {meant!r}?"
    elif foreign is not None:
        hint = foreign
    elif where.startswith("model.") and leaf in RolloutStage.model_fields:
        hint = f"{leaf!r} is a key of the stage: in TOML it stands above the first [table]"
    elif (guess := nearest(leaf, known)) is not None:
        hint = f"did you mean {guess!r}?"
    elif having := [name for name, keys in _tables(model).items() if leaf in keys]:
        keys = [".".join(filter(None, (parent, name, leaf))) for name in having]
        hint = f"did you mean {' or '.join(map(repr, keys))}?"
    else:
        hint = f"known here: {', '.join(known)}" if known else "it has no meaning here"
    return f"unknown key {where!r}: {hint}"


def _foreign(path: list[str]) -> str | None:
    """What to do instead of a foreign key, by the longest end of its path that is known."""
    for start in range(len(path)):
        key = ".".join(path[start:])
        critic = "critic" in path  # verl's has a model and an optimizer of its own
        if key in EXPLAINED:
            text = EXPLAINED[key]
            return text.replace(" optimizer.", " value.optimizer.") if critic else text
        if key in FOREIGN:
            own = FOREIGN[key]
            if critic and own.startswith("model."):
                return "the value model is set up in [value]"
            own = f"value.{own}" if critic and own.startswith("optimizer.") else own
            return f"in Keel it is {own!r}"
    return None


def _mistyped_table(
    table: str,
    value: Mapping[str, Any],
    parent: str,
    model: type[BaseModel] | None,
    data: Mapping[str, Any],
) -> str | None:
    """The key that was meant by one in a table of a mistyped name; None if none is like it.

    The table is one of the model that holds it, one that the recipe's stages share, or a stage.
    """
    tables = {".".join(filter(None, (parent, name))): k for name, k in _tables(model).items()}
    stages = [stage for stage in data.get("stages", []) if isinstance(stage, Mapping)]
    if parent in ("", *map(stage_name, stages)):
        tables |= {name: k for name, k in _tables(Recipe).items() if name != "stages"}
    if model is not None and "stage" in model.model_fields and len(stages) > 1:
        tables |= {stage_name(stage): list(model.model_fields) for stage in stages}
    names = {path.rpartition(".")[2]: path for path in tables}
    longer = [name for name in names if name.startswith(table)]
    guess = longer[0] if len(longer) == 1 else nearest(table, names)
    key = next(iter(value), None)
    if guess is None or key is None:
        return None
    inner = nearest(str(key), tables[names[guess]])
    return None if inner is None else f"{names[guess]}.{inner}"


def _tables(model: type[BaseModel] | None) -> dict[str, list[str]]:
    """The keys of a model that hold tables, each with the keys of its tables."""
    if model is None:
        return {}
    found = {
        name: [key for inner in models_in(info) for key in inner.model_fields]
        for name, info in model.model_fields.items()
    }
    return {name: keys for name, keys in found.items() if keys}


def _walk(
    loc: Location, data: Mapping[str, Any], root: type[BaseModel]
) -> tuple[str, type[BaseModel] | None]:
    """The key as the user writes it, and the model that holds it.

    pydantic puts the tag of a discriminated union into the location; the user never wrote it.
    """
    shown: list[str] = []
    model: type[BaseModel] | None = root
    pending: list[type[BaseModel]] = []
    for at, part in enumerate(loc):
        if pending and isinstance(part, str) and _tagged(pending, part):
            model, pending = _tagged(pending, part), []
            continue
        if isinstance(part, int):
            shown.append(str(part))
            continue
        shown.append(part)
        if at == len(loc) - 1:
            break
        info = model.model_fields.get(part) if model else None
        options = list(models_in(info)) if info else []
        model = options[0] if len(options) == 1 else None
        pending = options if len(options) > 1 else []
    return _shorten(shown, data), model


def models_in(info: FieldInfo | Any) -> Iterator[type[BaseModel]]:
    """The models in the annotation of a field."""
    annotation = info.annotation if isinstance(info, FieldInfo) else info
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def _tagged(options: list[type[BaseModel]], tag: str) -> type[BaseModel] | None:
    for option in options:
        for key in ("kind", "stage"):
            info = option.model_fields.get(key)
            if info is not None and info.default == tag:
                return option
    return None


def _shorten(parts: list[str], data: Mapping[str, Any]) -> str:
    """`stages.1.steps` as `rl.steps`, or `steps` if there is one stage."""
    if len(parts) > 1 and parts[0] == "stages" and parts[1].isdigit():
        stages = data.get("stages", [])
        at = int(parts[1])
        rest = parts[2:]
        if len(stages) > 1 and isinstance(stages[at], Mapping):
            rest = [stage_name(stages[at]), *rest]
        return ".".join(rest)
    return ".".join(parts)


# ---------------------------------------------------------------- names of TRL and verl

_NAMES: Final[dict[str, str]] = {
    "rollout.async_level": "ahead",
    "rollout.max_num_seqs": "max_rows",
    "optimizer.min_lr_ratio": "final_share",
    "tasks.validation_fraction": "heldout_share",
    "sampled.validation": "heldout",
    "tasks.validation_path": "heldout_path val_files",
    "rewards.functions.gate_below": "gate",
    "rewards.functions.gated_reward": "closed",
    "objective": "learns",
    "rollout.group_size": "num_generations n group_size",
    "rollout.prompts_per_step": "train_batch_size gen_batch_size prompts_per_step",
    "minibatches": "num_mini_batches steps_per_generation",
    "token_budget": "ppo_max_token_len_per_gpu",
    "rollout.max_tokens": (
        "max_completion_length max_new_tokens response_length max_response_length max_tokens"
    ),
    "prompts.max_tokens": "max_prompt_length",
    "steps": "max_steps total_training_steps",
    "num_train_epochs": "total_epochs num_epochs",
    "epochs": "num_iterations num_ppo_epochs ppo_epochs",
    "value.warmup_steps": "critic_warmup",
    "rollout.temperature": "temperature",
    "rollout.top_k": "top_k",
    "rollout.top_p": "top_p",
    "rollout.min_p": "min_p",
    "rollout.mask_truncated": "mask_truncated_completions",
    "rollout.dynamic_sampling": "filter_groups",
    "rollout.overlong_buffer": "soft_overlong",
    "rollout.stop_ids": "stop_token_ids",
    "algorithm.preset": "adv_estimator loss_type",
    "algorithm.divergence.beta": "beta kl_coef kl_loss_coef",
    "algorithm.divergence.estimator": "kl_loss_type kl_estimator",
    "algorithm.divergence.adaptive.target": "target_kl",
    "algorithm.surrogate.low": "epsilon epsilon_low clip_ratio clip_ratio_low cliprange",
    "algorithm.surrogate.high": "epsilon_high clip_ratio_high",
    "algorithm.surrogate.dual": "clip_ratio_c delta",
    "algorithm.value.clip": "cliprange_value",
    "algorithm.value.coefficient": "vf_coef",
    "algorithm.entropy": "entropy_coeff entropy_coef",
    "algorithm.advantage.gamma": "gamma",
    "algorithm.advantage.lam": "lam",
    "algorithm.advantage.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.advantage.whiten": "whiten_rewards",
    "algorithm.ratio": "importance_sampling_level",
    "algorithm.weights.kind": "loss_agg_mode",
    "algorithm.correction": "vllm_importance_sampling_correction",
    "algorithm.correction.cap": "vllm_importance_sampling_cap",
    "optimizer.learning_rate": "learning_rate lr",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.warmup_steps": "warmup_steps lr_warmup_steps",
    "optimizer.warmup_ratio": "warmup_ratio lr_warmup_steps_ratio",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.max_grad_norm": "max_grad_norm grad_clip clip_grad",
    "optimizer.epsilon": "adam_epsilon",
    "model.name": "model_name_or_path model.path",
    "model.dtype": "torch_dtype",
    "model.autocast": "bf16",
    "model.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "model.lora.rank": "lora_r lora_rank r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules lora_target_modules",
    "model.lora.dropout": "lora_dropout",
    "model.lora.rslora": "use_rslora",
    "model.lora.dora": "use_dora",
    "model.lora.adapter": "lora_adapter_path",
    "reference.reset_every": "sync_ref_model ref_model_sync_steps",
    "teacher.name": "teacher_model_name_or_path",
    "tasks.name": "dataset_name",
    "tasks.path": "train_files",
    "rewards.functions": "reward_funcs custom_reward_function",
    "rewards.functions.weight": "reward_weights",
    "prompts.chat_template": "chat_template_kwargs",
    "checkpoints.every": "save_steps save_freq",
    "checkpoints.keep": "save_total_limit",
    "evaluation.every": "eval_steps test_freq",
    "evaluation.samples": "num_samples val_kwargs.n evaluation.n",
    "evaluation.temperature": "val_kwargs.temperature",
    "evaluation.top_p": "val_kwargs.top_p",
    "evaluation.top_k": "val_kwargs.top_k",
    "trackers": "report_to logger",
    "--run on the command line": "output_dir default_local_dir",
    "tasks.prompt": "prompt_key",
    "rollout.vllm.gpu_memory_utilization": "gpu_memory_utilization",
    "rollout.vllm.sleep_level": "vllm_enable_sleep_mode enable_sleep_mode free_cache_engine",
    "cluster.processes": "n_gpus_per_node",
    "name": "run_name experiment_name",
    "model.lora": "peft_config",
    "value.name": "critic.model.path",
}
"""Keel's key (a path within a stage, but for `model.*`), and the foreign keys that mean it."""
FOREIGN: Final = {name: own for own, names in _NAMES.items() for name in names.split()}
"""Foreign key to Keel's; its end, or all of it."""

_EXPLANATIONS: Final[dict[str, str]] = {
    "gradient_accumulation_steps ppo_micro_batch_size_per_gpu": (
        "counts sequences or micro-batches: set token_budget, the tokens of a micro-batch; the "
        "result does not depend on it"
    ),
    "ppo_mini_batch_size": "counts prompts: set minibatches, the optimizer steps of an epoch",
    "use_kl_loss use_kl_in_reward": (
        "switches the divergence: set algorithm.divergence.beta (0 is off)"
    ),
    "adam_beta1 adam_beta2": "is one of two: set optimizer.betas = [0.9, 0.999]",
    "train_dataset dataset": "in keel.train it is data",
    "eval_dataset": "in keel.train it is eval_data",
    "processing_class": "in keel.train it is tokenizer",
    "callback": "in keel.train it is callbacks",
    "args": (
        "holds keys of a trainer: pass a recipe's keys, such as steps=50 or "
        '**{"optimizer.learning_rate": 1e-5}'
    ),
    "logging_steps log_freq": "every step is recorded and shown: leave the key out",
    "custom_reward_function.path custom_reward_function.name": (
        'is file and function: rewards.functions.function = "path/to/file.py:function"'
    ),
    "reward_model.enable reward_model.model.path reward_model.path": (
        "name a reward model in rewards.functions: "
        '{function = "outcome", options = {model = FOLDER}}'
    ),
    "tensor_model_parallel_size": (
        'is an argument of vLLM: rollout.vllm.arguments = ["--tensor-parallel-size=2"]'
    ),
    "per_device_train_batch_size generation_batch_size": (
        "counts completions in TRL: set rollout.prompts_per_step to that number, times the "
        "processes for a number per device, over rollout.group_size"
    ),
    "use_vllm vllm_mode vllm_server_host vllm_gpu_memory_utilization": (
        'Keel samples with an engine of its own: leave the key out, or set rollout.engine = "vllm" '
        "(its keys are in rollout.vllm)"
    ),
}
EXPLAINED: Final = {name: text for names, text in _EXPLANATIONS.items() for name in names.split()}
"""Foreign keys that no single key of Keel's stands for: what to do instead."""
