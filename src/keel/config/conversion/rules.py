"""What no single key says: sizes, steps, the divergence, rewards and data of each framework.

A rule reads keys of a `Foreign` and yields keys of Keel with their values; `refuse` and `ignore`
say of a key why it has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from keel.config.conversion.trl_losses import trl_correction as trl_correction
from keel.config.conversion.trl_losses import trl_entropy as trl_entropy
from keel.config.conversion.trl_losses import trl_masks as trl_masks
from keel.config.conversion.trl_losses import trl_preference as trl_preference
from keel.config.conversion.values import Foreign, is_number

Keys = Iterator[tuple[str, Any]]
DIVERGENCE = "algorithm.divergence"
_ESTIMATORS: Final = {
    **{"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"},
    **{"low_var_kl": "k3", "k3": "k3"},
}
FILES: Final = (".jsonl", ".jsonl.gz", ".parquet")
_READERS: Final = {
    **{".json": "json", ".json.gz": "json", ".csv": "csv", ".txt": "text", ".arrow": "arrow"},
    **{".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"},
}
"""By ending, what `datasets` reads a file with."""


def surrogate(c: Foreign) -> Keys:
    """The parameters of the surrogate, by the expressions of the table for its kind."""
    kind = c.out.get("algorithm.surrogate.kind")
    table = c.out.pop("surrogate.table", kind)
    for name, text in c.program.surrogate.get(table, {}).items():
        sign, keys = re.fullmatch(r"(?:1 ([+-]) )?(.*)", text).groups()  # type: ignore[union-attr]
        value = next((c[key] for key in keys.split(" or ") if c[key] is not None), None)
        if value is not None:
            yield (
                f"algorithm.{name}" if "." in name else f"algorithm.surrogate.{name}",
                value if sign is None else 1 + float(f"{sign}{value}"),
            )


def minibatches(c: Foreign) -> Keys:
    """Optimizer steps of an epoch: verl's size counts prompts, OpenRLHF's completions."""
    key = "ppo_mini_batch_size"
    if c[key] is not None:
        parts = Fraction(c["data.train_batch_size"], c["actor.ppo_mini_batch_size"])
    else:
        key, size = "train_batch_size", c["rollout_batch_size"] * c["n_samples_per_prompt"]
        parts = Fraction(size, c[key])
    if parts.denominator > 1 and parts > 1:
        c.refuse(key, "mini-batches are equal parts of a step")
    else:
        yield "minibatches", max(int(parts), 1)


def _divergence(
    c: Foreign, where: str, estimator: str, beta: float, adaptive: Iterable[float] | None = None
) -> Keys:
    values = {"to": "reference", "where": where, "estimator": estimator, "beta": float(beta)}
    yield from ((f"{DIVERGENCE}.{name}", value) for name, value in values.items())
    if adaptive is not None:
        target, horizon = adaptive
        yield f"{DIVERGENCE}.adaptive.rule", "ziegler"
        yield f"{DIVERGENCE}.adaptive.target", float(target)
        yield f"{DIVERGENCE}.adaptive.horizon", float(horizon)


def _source(path: str, options: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A table of data: a file, or a name of `datasets`; `options` are of `load_dataset`."""
    given = {key: value for key, value in (options or {}).items() if value not in (None, False)}
    files = given.get("data_files")
    if path in _READERS.values() and isinstance(files, str) and files.endswith(FILES):
        path = given.pop("data_files")
    if path.endswith(FILES) and not given:
        return {"path": path, **more}
    reader = next((name for end, name in _READERS.items() if path.endswith(end)), None)
    if reader is not None:
        path, given = reader, {"data_files": path, **given}
    return {"name": "datasets", "path": path, **({"options": given} if given else {}), **more}


def _reward(name: str, **more: Any) -> dict[str, Any]:
    """A reward by its name there: a function (`module.function`), a file's, or a model."""
    if ":" in name or name.endswith(".py"):
        return {"function": name, **more}
    if "/" in name:
        return {"function": "outcome", "options": {"model": name}, **more}
    module, _, function = name.rpartition(".")
    return {"function": f"{module}:{function}", **more}


# ---------------------------------------------------------------- TRL


def _trl_updates(c: Foreign) -> tuple[Fraction, int]:
    """Optimizer steps on the completions of one generation, in one pass, and their number."""
    per = c["per_device_train_batch_size"] * c["num_processes"]
    accumulated, size = c["gradient_accumulation_steps"], c["generation_batch_size"]
    parts = c["steps_per_generation"] or (size // per if size else accumulated)
    return Fraction(parts, accumulated), size or per * parts


def _trl_scale(c: Foreign) -> int:
    """Optimizer steps of one step of Keel's."""
    if c.program.stage != "rl":
        return 1
    return max(math.ceil(_trl_updates(c)[0]), 1) * int(c["num_iterations"])


_LOGGED: Final = 10
"""TRL's logging_steps, which evaluations are at unless eval_steps says when."""


def trl_steps(c: Foreign) -> Keys:
    """Sizes of a step, and what is counted in steps, which are optimizer steps in TRL."""
    if c.program.stage == "rl":
        updates, size = _trl_updates(c)
        group = c["num_generations"]
        yield "rollout.group_size", group
        yield "epochs", c["num_iterations"]
        prompts = Fraction(size, group) / min(updates or Fraction(1), Fraction(1))
        if not updates:
            per = c["per_device_train_batch_size"] * c["num_processes"]
            c.refuse("generation_batch_size", f"{size} completions are less than a batch of {per}")
        elif prompts.denominator > 1:
            c.refuse("num_generations", f"{size} completions are not whole groups of {group}")
        else:
            yield "rollout.prompts_per_step", int(prompts)
        if updates > 1 and updates.denominator > 1:
            c.refuse("steps_per_generation", "optimizer steps are whole parts of a generation")
        else:
            yield "minibatches", max(int(updates), 1)
    else:
        size = c["per_device_train_batch_size"] * c["num_processes"]
        yield "batch_size", size * c["gradient_accumulation_steps"]
    scale = _trl_scale(c)
    if c["max_steps"] > 0:
        yield "steps", math.ceil(c["max_steps"] / scale)
    else:
        yield "num_train_epochs", float(c["num_train_epochs"])
    if c["save_strategy"] == "steps" and c["save_steps"] >= 1:
        yield "checkpoints.every", max(int(c["save_steps"]) // scale, 1)
    elif c["save_strategy"] != "no":
        c.refuse("save_strategy", "checkpoints are written every few steps: checkpoints.every")
    every = c["eval_steps"] or c["logging_steps"] or _LOGGED
    if c["eval_strategy"] == "no":
        if c.program.stage == "rl":
            yield "evaluation.every", 0
    elif c["eval_strategy"] == "steps" and is_number(every) and every >= 1:
        yield "evaluation.every", max(int(every) // scale, 1)
    else:
        c.refuse("eval_strategy", "evaluations are every few steps: set evaluation.every")


NO_WARMUP = "transformers' constant schedule has none; that of constant_with_warmup has"


def trl_warmup(c: Foreign) -> Keys:
    """A warm-up in steps, or (below 1) as a share of them."""
    steps, ratio = c["warmup_steps"] or 0, c["warmup_ratio"] or 0.0
    if c["lr_scheduler_type"] == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            c.ignore(key, NO_WARMUP)
        return
    if steps >= 1 and ratio:
        c.ignore("warmup_ratio", "warmup_steps is set, and counts before it")
        ratio = 0.0
    if 0 < steps < 1 or ratio:
        yield "optimizer.warmup_ratio", float(ratio or steps)
    else:
        yield "optimizer.warmup_steps", math.ceil(steps / _trl_scale(c))


def trl_betas(c: Foreign) -> Keys:
    """AdamW's two decay rates."""
    yield "optimizer.betas", [c["adam_beta1"], c["adam_beta2"]]


def trl_schedule(c: Foreign) -> Keys:
    """Where a cosine ends."""
    given = c["lr_scheduler_kwargs"] or {}
    if set(given) - {"min_lr_rate", "min_lr"} or not all(map(is_number, given.values())):
        c.refuse("lr_scheduler_kwargs", "only the end of the schedule is a key: min_lr_ratio")
    elif given and c["learning_rate"]:
        low = given.get("min_lr_rate", given.get("min_lr", 0.0) / c["learning_rate"])
        yield "optimizer.min_lr_ratio", low


def trl_data(c: Foreign) -> Keys:
    """The data set: prompts, pairs, or texts."""
    name = c["dataset_name"]
    gold = any(_trl_reward(c, one).get("function") == "math" for one in _listed(c["reward_funcs"]))
    if name is None:
        if gold:
            c.missing("tasks", "no data is named; train.jsonl stands for it")
            yield "tasks", [{"path": "train.jsonl", "answer": "solution"}]
        return
    split = c["dataset_train_split"]
    options = {"name": c["dataset_config"], "streaming": c["dataset_streaming"]}
    options |= {"split": None if split == "train" else split, **(c["load_options"] or {})}
    more: dict[str, Any] = {}
    if gold:
        more["answer"] = "solution"
    if (c["dataset_text_field"] or "text") != "text":
        more["columns"] = {"text": c["dataset_text_field"]}
    test, file, files = c["dataset_test_split"], c["validation_file"], options.get("data_files")
    if isinstance(files, dict) and str(files.get("train")).endswith(FILES):
        options["data_files"], file = files["train"], files.get(test)
    source = _source(name, options, **more)
    held = test if test != "no" and not isinstance(files, str | list) else None
    held = file if "name" not in source and str(file).endswith(FILES) else held
    if c["eval_strategy"] != "no" and held is not None:
        source["validation_path"] = held
    if file is not None and held != file:
        why = "set validation_path to a file of .jsonl or .parquet, as the train data have one"
        c.refuse("validation_file", f"{why}; without it a share of the train data is held out")
    yield ("tasks", [source]) if c.program.stage == "rl" else ("data", source)


def trl_loss_on(c: Foreign) -> Keys:
    """The tokens that bear loss; TRL decides it by the form of the rows unless it is set."""
    if c["assistant_only_loss"] or c["completion_only_loss"]:
        yield "loss_on", "assistant"
    elif c["completion_only_loss"] is not None:
        yield "loss_on", "all"
    else:
        why = 'TRL learns the completion of rows with prompt and completion ("assistant"), and'
        c.missing("loss_on", f'{why} every token of rows with messages or a text ("all")')


def _trl_reward(c: Foreign, name: str) -> Mapping[str, Any]:
    """The reward that is TRL's of this name; nothing for another."""
    found: Mapping[str, Any] = c.rewards.get(re.sub(r"^trl\.(\w+[.:])*", "", name), {})
    return found


def trl_rewards(c: Foreign) -> Keys:
    """Functions by name or path, and a model, with their weights."""
    named = _listed(c["reward_funcs"]) + _listed(c["reward_model_name_or_path"])
    weights = c["reward_weights"] or [1.0] * len(named)
    weights = weights if isinstance(weights, list) else [weights]
    if len(weights) != len(named):
        c.refuse("reward_weights", f"{len(weights)} weights of {len(named)} rewards")
        weights = [1.0] * len(named)
    found = []
    for name, weight in zip(named, weights, strict=False):
        if known := _trl_reward(c, name):
            found.append({**known, "weight": float(weight)})
        elif not re.fullmatch(r"[\w.~-]*[/.:][\w./:~-]*", name):
            c.refuse("reward_funcs", f"{name}: write it as path/to/file.py:function", name)
        else:
            found.append(_reward(name, weight=float(weight)))
    if (bounds := c["reward_clip_range"]) is not None:
        if len(found) == 1 and found[0]["weight"] == 1.0:
            found[0]["clip"] = [float(bound) for bound in bounds]
        else:
            c.refuse("reward_clip_range", "a clip is of one reward: rewards.functions.clip")
    if found:
        yield "rewards.functions", found


def trl_reference(c: Foreign) -> Keys:
    """A reference that follows the policy."""
    if not c["sync_ref_model"]:
        return
    if c["ref_model_mixup_alpha"] == 1.0:
        yield "reference.reset_every", math.ceil(c["ref_model_sync_steps"] / _trl_scale(c))
    else:
        c.refuse("sync_ref_model", "the reference is set to the policy, not mixed with it")


def trl_divergence(c: Foreign) -> Keys:
    """k3 in the loss, weighed by the ratio or not; of RLOO k1 in the reward."""
    if not c["beta"]:
        yield DIVERGENCE, "none"
        return
    if "use_bias_correction_kl" not in c.values:
        yield from _divergence(c, "reward", "k1", c["beta"])
        return
    yield from _divergence(c, "loss", "k3", c["beta"])
    weighed = c["use_bias_correction_kl"]
    of_tokens = c["importance_sampling_level"] == "token"
    yield f"{DIVERGENCE}.unbiased", weighed if of_tokens or not weighed else "ratio"


def stop_properly(c: Foreign) -> Keys:
    """OpenRLHF's factor of the reward of completions that were cut."""
    factor = c[key := "stop_properly_penalty_coef"]
    if factor is not None and (factor < 0 or c["overlong_buffer_len"]):
        c.refuse(key, "Keel's factor is at least 0, and of the reward without penalties of length")
    elif factor is not None:
        yield "rollout.truncated_factor", factor


# ---------------------------------------------------------------- verl


def verl_masks(c: Foreign) -> Keys:
    """The bounds of Clip-Cov, whose kind the loss is."""
    if c["policy_loss.loss_mode"] == "clip_cov":
        for own, key in (("share", "ratio"), ("floor", "lb"), ("cap", "ub")):
            yield f"algorithm.masks.{own}", c[f"policy_loss.clip_cov_{key}"]


def verl_divergence(c: Foreign) -> Keys:
    """In the reward or in the loss; Keel's objective has one."""
    in_reward = c["use_kl_in_reward"] and c["kl_ctrl.kl_coef"] > 0
    in_loss = c["use_kl_loss"] and c["kl_loss_coef"] > 0
    if in_reward and in_loss:
        c.refuse("use_kl_in_reward", "the objective has one divergence: that in the loss is kept")
    if in_loss:
        name = str(c["kl_loss_type"])
        estimator = "k2" if name.endswith("+") else _ESTIMATORS.get(name, name)
        if estimator == "k1":
            c.ignore("use_kl_loss", "the gradient of k1 in the loss is 0 in expectation")
        else:
            yield from _divergence(c, "loss", estimator, c["kl_loss_coef"])
            return
    elif in_reward and c["adv_estimator"] == "reinforce_plus_plus_baseline":
        c.refuse("use_kl_in_reward", "verl takes the penalty off before the group's baseline")
    elif in_reward:
        name = str(c["algorithm.kl_penalty"]).removesuffix("+")
        moves = c["kl_ctrl.type"] == "adaptive"
        rule = (c["kl_ctrl.target_kl"], c["kl_ctrl.horizon"]) if moves else None
        estimator = _ESTIMATORS.get(name, name)
        yield from _divergence(c, "reward", estimator, c["kl_ctrl.kl_coef"], rule)
        return
    yield DIVERGENCE, "none"


def _verl_files(c: Foreign, more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The train files as sources, with their validation files if there are as many."""
    files, tests = (_listed(c[key]) for key in ("data.train_files", "data.val_files"))
    held: list[dict[str, Any]] = [{"validation_path": path} for path in tests]
    if len(tests) != len(files):
        c.refuse("data.val_files", "each file has its own validation_path, or a share of its rows")
        held = [{}] * len(files)
    _of_equal_weight(c, files, "data.train_files")
    return [_source(path, **more, **own) for path, own in zip(files, held, strict=True)]


def _of_equal_weight(c: Foreign, paths: Sequence[str], key: str) -> None:
    """Several sets without shares, which the framework reads one after the other."""
    own = {"sft": "data", "rl": "tasks"}.get(c.program.stage)
    if len(paths) > 1 and own is not None:
        c.missing(
            f"{own}.weight",
            f"the sets of {key} are read as one there; here each is drawn from as often as "
            "another: set the weight of each to its number of rows",
        )


def verl_data(c: Foreign) -> Keys:
    """Files of verl's own form: messages, and the gold answer in `reward_model.ground_truth`."""
    prompt = {} if c["data.prompt_key"] == "prompt" else {"prompt": c["data.prompt_key"]}
    yield "tasks", _verl_files(c, {**prompt, "answer": "reward_model.ground_truth"})


def _listed(value: Any) -> list[str]:
    return [] if value is None else [*map(str, value)] if isinstance(value, list) else [str(value)]


def verl_rewards(c: Foreign) -> Keys:
    """A function or model; else the score that verl chooses by the name of the data."""
    found: list[dict[str, Any]] = []
    if path := c["custom_reward_function.path"]:
        found.append({"function": f"{path}:{c['custom_reward_function.name']}"})
        c.missing(
            "rewards.functions", "the function takes other arguments: (completions, **columns)"
        )
    if c["reward_model.enable"]:
        found.append({"function": "outcome", "options": {"model": c["reward_model.model.path"]}})
    names = " ".join(_listed(c["data.train_files"])).lower()
    if not found and ("gsm8k" in names or "math" in names):
        found.append({"function": "math" if "math" in names else "numeric_match"})
    if not found:
        c.missing("rewards.functions", "verl chooses the score by the column data_source")
    yield "rewards.functions", found
    for above in ("reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        enabled = c[f"{above}.enable"]
        if enabled and c[f"{above}.penalty_factor"] != 1.0:
            c.refuse(f"{above}.penalty_factor", "the penalty of length is at most 1, as DAPO's")
        elif enabled:
            yield "rollout.overlong_buffer", c[f"{above}.len"]


def _verl_warmup(c: Foreign, optim: str, own: str) -> Keys:
    """verl counts the steps unless they are negative, then the share."""
    steps, share = c[f"{optim}.lr_warmup_steps"], c[f"{optim}.lr_warmup_steps_ratio"]
    if is_number(steps) and steps >= 0:
        c.ignore(f"{optim}.lr_warmup_steps_ratio", "lr_warmup_steps is set, and counts before it")
        yield f"{own}.warmup_steps", steps
    elif share:
        yield f"{own}.warmup_ratio", share


def verl_warmup(c: Foreign) -> Keys:
    """The warm-up of the policy."""
    yield from _verl_warmup(c, "actor_rollout_ref.actor.optim", "optimizer")


def verl_critic_warmup(c: Foreign) -> Keys:
    """The warm-up of the critic."""
    yield from _verl_warmup(c, "critic.optim", "value.optimizer")


def verl_validation(c: Foreign) -> Keys:
    """How many rows are validated on."""
    most, every = c["data.val_max_samples"], c["trainer.test_freq"]
    if most != -1:
        yield "evaluation.prompts", most
    elif every != -1:
        c.missing("evaluation.prompts", "verl validates on all rows, Keel on 200: set their number")


def verl_refills(c: Foreign) -> Keys:
    """verl counts the first batch, too; 0 is without a bound."""
    key = "filter_groups.max_num_gen_batches"
    if (most := c[key]) is not None and most > 1:
        yield "rollout.max_refills", most - 1
    elif most is not None:
        c.refuse(key, "rollout.max_refills is 1 or more, and always a bound")


def verl_sft(c: Foreign) -> Keys:
    """Files of messages, or of prompts and answers; the loss is on what the model would write."""
    keys = {"prompt": c["data.prompt_key"], "completion": c["data.response_key"]}
    if c["multiturn.enable"]:
        keys = {"messages": c["multiturn.messages_key"]}
    columns = {own: name for own, name in keys.items() if own != name}
    yield "data", _verl_files(c, {"columns": columns} if columns else {})


# ---------------------------------------------------------------- OpenRLHF


def openrlhf_warmup(c: Foreign) -> Keys:
    """A share of the steps."""
    if c["lr_scheduler"] == "constant":
        c.ignore("lr_warmup_ratio", NO_WARMUP)
    else:
        yield "optimizer.warmup_ratio", c["lr_warmup_ratio"]


def openrlhf_divergence(c: Foreign) -> Keys:
    """A token mean in the loss, or the reward of each token."""
    beta, target = c["init_kl_coef"], c["kl_target"]
    after_group = c.out.pop("divergence.after_group", False)
    estimator = "k3" if c["use_kl_estimator_k3"] else c["kl_estimator"]
    if not beta or beta <= 0:
        yield DIVERGENCE, "none"
    elif c["use_kl_loss"] and estimator == "k1":
        c.ignore("use_kl_loss", "the gradient of k1 in the loss is 0 in expectation")
        yield DIVERGENCE, "none"
    elif c["use_kl_loss"]:
        yield from _divergence(c, "loss", estimator, beta)
    elif after_group:
        why = "OpenRLHF takes the penalty off token by token after the group is compared"
        c.refuse("init_kl_coef", f"{why}: set algorithm.divergence.where, there before it")
        yield DIVERGENCE, "none"
    else:
        rule = None if target is None else (target, c["kl_horizon"])
        yield from _divergence(c, "reward", estimator, beta, rule)


def openrlhf_critic(c: Foreign) -> Keys:
    """The value model's optimizer: a rate of its own, and all else as the policy's."""
    yield "value.optimizer.learning_rate", c["critic_learning_rate"]
    same = ("betas", "weight_decay", "schedule", "min_lr_ratio", "warmup_ratio", "max_grad_norm")
    for own in (f"optimizer.{name}" for name in same):
        if own in c.out:
            c.out[f"value.{own}"], c.origin[f"value.{own}"] = c.out[own], c.origin[own]


def openrlhf_rewards(c: Foreign) -> Keys:
    """Reward models, or a file whose `reward_func(queries, prompts, labels)` is called."""
    found: list[dict[str, Any]] = [
        _reward(f"./{one}" if "/" not in one else one) for one in _named(c["reward_pretrain"])
    ]
    for one in _named(c["remote_rm_url"]):
        if one.endswith(".py"):
            found.append({"function": f"{one}:reward_func"})
            c.missing(
                "rewards.functions", "reward_func takes other arguments: (completions, **columns)"
            )
        else:
            c.refuse(
                "remote_rm_url",
                'the built-in reward http asks a server: [[rewards.functions]] function = "http" '
                "and options.url; its requests have a form of their own",
            )
    if c["agent_func_path"]:
        c.refuse("agent_func_path", "an agent is a program in Keel: rollout.program")
    bounds = [float(bound) for bound in c["reward_clip_range"]]
    if not found:
        c.missing("rewards.functions", "no reward model or function is named")
    if len(found) == 1:
        found[0]["clip"] = bounds
    yield "rewards.functions", found


def _named(value: Any) -> list[str]:
    return [part for one in _listed(value) for part in one.split(",") if part]


def _openrlhf_sources(c: Foreign, names: str, more: dict[str, Any]) -> list[dict[str, Any]]:
    """The data that a key names, by their shares."""
    paths, shares = _named(c[names]), _listed(c[f"{names}_probs"])
    if not c["apply_chat_template"]:
        more["raw"] = True
    if c["eval_dataset"] and len(paths) == 1:
        more["validation_path"] = c["eval_dataset"]
    elif c["eval_dataset"]:
        c.refuse("eval_dataset", "each of several sets has its own validation_path")
    sources = [_source(path, **more) for path in paths]
    for source, share in zip(sources, shares if len(paths) > 1 else (), strict=False):
        source["weight"] = float(share)
    if not shares:
        _of_equal_weight(c, paths, names)
    return sources


def openrlhf_data(c: Foreign) -> Keys:
    """Prompts: a column, or a template over it, with or without the chat template."""
    key, template = c["input_key"], c["input_template"]
    if c["prompt_split"] != "train":
        c.refuse("prompt_split", "set tasks.options.split")
    more: dict[str, Any] = {"prompt": template.replace("{}", f"{{{key}}}") if template else key}
    if c["label_key"]:
        more["answer"] = c["label_key"]
    if tasks := _openrlhf_sources(c, "prompt_data", more):
        yield "tasks", tasks


def openrlhf_examples(c: Foreign) -> Keys:
    """Pairs of one data set, or examples of several."""
    sft = c.program.stage == "sft"
    if c["input_template"]:
        c.refuse("input_template", "write the prompts as they are to be read into the file")
    columns = {own: c[f"{own}_key"] for own in ("prompt", "chosen", "rejected")}
    if sft:
        own = ("messages",) if c["multiturn"] else ("prompt", "completion")
        columns = dict(zip(own, (c["input_key"], c["output_key"]), strict=False))
    columns = {own: name for own, name in columns.items() if name and name != own}
    sources = _openrlhf_sources(c, "dataset", {"columns": columns} if columns else {})
    if len(sources) > 1 and not sft:
        c.refuse("dataset", "a stage learns from one set of pairs: the first is kept")
    if sources:
        yield "data", sources if sft else {k: v for k, v in sources[0].items() if k != "weight"}


def openrlhf_vllm(c: Foreign) -> Keys:
    """Whether vLLM samples."""
    if c["vllm_num_engines"]:
        yield "rollout.engine", "vllm"
