"""What TRL and verl call the keys of a recipe: for the error that greets a familiar name."""

from __future__ import annotations

from typing import Final

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
    "optimizer.weight_decay": "weight_decay",
    "optimizer.max_grad_norm": "max_grad_norm grad_clip clip_grad",
    "optimizer.epsilon": "adam_epsilon",
    "model.name": "model_name_or_path model.path",
    "model.dtype": "torch_dtype",
    "model.autocast": "bf16",
    "model.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "model.lora.rank": "lora_r lora_rank r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules",
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
    "cluster.processes": "n_gpus_per_node",
    "name": "run_name experiment_name",
    "model.lora": "peft_config",
    "value.name": "critic.model.path",
}
"""Keel's key (a path within a stage, but for `model.*`), and the foreign keys that mean it."""
FOREIGN: Final = {name: own for own, names in _NAMES.items() for name in names.split()}
"""Foreign key to Keel's; its end, or all of it."""

_EXPLANATIONS: Final[dict[str, str]] = {
    "num_train_epochs total_epochs num_epochs": (
        "counts passes over the data: set steps, each of rollout.prompts_per_step prompts (or "
        "batch_size examples)"
    ),
    "warmup_ratio lr_warmup_steps_ratio": (
        "is a share of the steps: set optimizer.warmup_steps, which counts steps"
    ),
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
ELSEWHERE: Final[dict[str, str]] = {
    "dqn": "Q-learning runs on environments: use keel control dqn --env ID",
    "q_learning": "Q-learning runs on environments: use keel control dqn --env ID",
}
"""What is not a value of `algorithm`, though others call it an algorithm: where it is."""
