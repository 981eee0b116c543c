"""What TRL and verl call the keys of a recipe: for the error that greets a familiar name."""

from __future__ import annotations

from typing import Final

FOREIGN: Final[dict[str, str]] = {
    # earlier names of Keel
    "ahead": "rollout.async_level",
    "final_share": "optimizer.min_lr_ratio",
    "heldout_share": "tasks.validation_fraction",
    "heldout": "sampled.validation",
    "heldout_path": "tasks.validation_path",
    "gate": "rewards.functions.gate_below",
    "closed": "rewards.functions.gated_reward",
    "learns": "objective",
    # sizes
    "num_generations": "rollout.group_size",
    "n": "rollout.group_size",
    "train_batch_size": "rollout.prompts_per_step",
    "gen_batch_size": "rollout.prompts_per_step",
    "num_mini_batches": "minibatches",
    "steps_per_generation": "minibatches",
    "ppo_max_token_len_per_gpu": "token_budget",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "response_length": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_prompt_length": "prompts.max_tokens",
    "max_steps": "steps",
    "total_training_steps": "steps",
    "num_iterations": "epochs",
    "num_ppo_epochs": "epochs",
    "ppo_epochs": "epochs",
    "critic_warmup": "value.warmup_steps",
    # sampling
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "min_p": "rollout.min_p",
    "group_size": "rollout.group_size",
    "max_tokens": "rollout.max_tokens",
    "prompts_per_step": "rollout.prompts_per_step",
    "mask_truncated_completions": "rollout.mask_truncated",
    "filter_groups": "rollout.dynamic_sampling",
    "soft_overlong": "rollout.overlong_buffer",
    "stop_token_ids": "rollout.stop_ids",
    # objective
    "adv_estimator": "algorithm.preset",
    "loss_type": "algorithm.preset",
    "beta": "algorithm.divergence.beta",
    "kl_coef": "algorithm.divergence.beta",
    "kl_loss_coef": "algorithm.divergence.beta",
    "kl_loss_type": "algorithm.divergence.estimator",
    "kl_estimator": "algorithm.divergence.estimator",
    "target_kl": "algorithm.divergence.adaptive.target",
    "epsilon": "algorithm.surrogate.low",
    "epsilon_low": "algorithm.surrogate.low",
    "epsilon_high": "algorithm.surrogate.high",
    "clip_ratio": "algorithm.surrogate.low",
    "clip_ratio_low": "algorithm.surrogate.low",
    "clip_ratio_high": "algorithm.surrogate.high",
    "clip_ratio_c": "algorithm.surrogate.dual",
    "delta": "algorithm.surrogate.dual",
    "cliprange": "algorithm.surrogate.low",
    "cliprange_value": "algorithm.value.clip",
    "vf_coef": "algorithm.value.coefficient",
    "entropy_coeff": "algorithm.entropy",
    "entropy_coef": "algorithm.entropy",
    "gamma": "algorithm.advantage.gamma",
    "lam": "algorithm.advantage.lam",
    "scale_rewards": "algorithm.advantage.scale",
    "norm_adv_by_std_in_grpo": "algorithm.advantage.scale",
    "whiten_rewards": "algorithm.advantage.whiten",
    "importance_sampling_level": "algorithm.ratio",
    "loss_agg_mode": "algorithm.weights.kind",
    "vllm_importance_sampling_correction": "algorithm.correction",
    "vllm_importance_sampling_cap": "algorithm.correction.cap",
    # optimizer
    "learning_rate": "optimizer.learning_rate",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "clip_grad": "optimizer.max_grad_norm",
    "adam_epsilon": "optimizer.epsilon",
    # models
    "model_name_or_path": "model.name",
    "path": "model.name",
    "torch_dtype": "model.dtype",
    "bf16": "model.autocast",
    "gradient_checkpointing": "model.activation_checkpointing",
    "enable_gradient_checkpointing": "model.activation_checkpointing",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.targets",
    "sync_ref_model": "reference.reset_every",
    "ref_model_sync_steps": "reference.reset_every",
    "teacher_model_name_or_path": "teacher.name",
    # data, rewards, bookkeeping
    "dataset_name": "tasks.name",
    "train_files": "tasks.path",
    "val_files": "tasks.validation_path",
    "reward_funcs": "rewards.functions",
    "reward_weights": "rewards.functions.weight",
    "custom_reward_function": "rewards.functions",
    "chat_template_kwargs": "prompts.chat_template",
    "save_steps": "checkpoints.every",
    "save_freq": "checkpoints.every",
    "save_total_limit": "checkpoints.keep",
    "eval_steps": "evaluation.every",
    "test_freq": "evaluation.every",
    "num_samples": "evaluation.samples",
    "report_to": "trackers",
    "output_dir": "--run on the command line",
    "default_local_dir": "--run on the command line",
    "logger": "trackers",
    "prompt_key": "tasks.prompt",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "n_gpus_per_node": "cluster.processes",
    "run_name": "name",
    "experiment_name": "name",
    "adam_beta1": "optimizer.betas.0",
    "adam_beta2": "optimizer.betas.1",
    "critic.model.path": "value.name",
}
"""Foreign key to Keel's (a path within a stage, but for `model.*`); its end, or all of it."""

COMPLETIONS = (
    "counts completions in TRL: set rollout.prompts_per_step to that number, times the processes "
    "for a number per device, over rollout.group_size"
)
ENGINE = (
    'Keel samples with an engine of its own: leave the key out, or set rollout.engine = "vllm" '
    "(its keys are in rollout.vllm)"
)
EPOCHS = (
    "counts passes over the data: set steps, each of rollout.prompts_per_step prompts (or "
    "batch_size examples)"
)
SHARE = "is a share of the steps: set optimizer.warmup_steps, which counts steps"
MICRO = (
    "counts sequences or micro-batches: set token_budget, the tokens of a micro-batch; the result "
    "does not depend on it"
)
KL = "switches the divergence: set algorithm.divergence.beta (0 is off)"
RECORDED = "every step is recorded and shown: leave the key out"
REWARD_MODEL = (
    'name a reward model in rewards.functions: {function = "outcome", options = {model = FOLDER}}'
)
EXPLAINED: Final[dict[str, str]] = {
    "num_train_epochs": EPOCHS,
    "total_epochs": EPOCHS,
    "num_epochs": EPOCHS,
    "warmup_ratio": SHARE,
    "lr_warmup_steps_ratio": SHARE,
    "gradient_accumulation_steps": MICRO,
    "ppo_micro_batch_size_per_gpu": MICRO,
    "ppo_mini_batch_size": "counts prompts: set minibatches, the optimizer steps of an epoch",
    "use_kl_loss": KL,
    "use_kl_in_reward": KL,
    "logging_steps": RECORDED,
    "log_freq": RECORDED,
    "reward_model.enable": REWARD_MODEL,
    "reward_model.model.path": REWARD_MODEL,
    "tensor_model_parallel_size": (
        'is an argument of vLLM: rollout.vllm.arguments = ["--tensor-parallel-size=2"]'
    ),
    "per_device_train_batch_size": COMPLETIONS,
    "generation_batch_size": COMPLETIONS,
    "use_vllm": ENGINE,
    "vllm_mode": ENGINE,
    "vllm_server_host": ENGINE,
    "vllm_gpu_memory_utilization": ENGINE,
}
"""Foreign keys that no single key of Keel's stands for: what to do instead."""
STAGES: Final[dict[str, str]] = {
    "dpo": 'DPO is a stage: set stage = "dpo"',
    "sft": 'supervised fine-tuning is a stage: set stage = "sft"',
    "reward_model": 'a reward model is a stage: set stage = "reward_model"',
    "process_reward_model": 'a process reward model is a stage: set stage = "process_reward_model"',
    "dqn": "Q-learning runs on environments: use keel control dqn --env ID",
    "q_learning": "Q-learning runs on environments: use keel control dqn --env ID",
}
"""What is not a value of `algorithm`, though others call it an algorithm: where it is."""
