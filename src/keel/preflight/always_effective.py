"""The keys that do something wherever they may be set; see `preflight.unused_keys`."""

from __future__ import annotations

from typing import Final

_ALWAYS: Final = """
    name description seed threads stage
    model.name model.build.family model.build.tokenizer model.build.hidden_size model.build.layers
    model.build.heads model.build.intermediate_size model.build.context model.build.options
    model.dtype model.device model.activation_checkpointing
    model.lora model.lora.rank model.lora.alpha model.lora.targets
    steps epochs minibatches batch_size token_budget max_tokens on_nonfinite demonstration
    prompts.max_tokens
    tasks.name tasks.path tasks.heldout_path tasks.prompt tasks.answer tasks.system tasks.options
    rewards.functions.function rewards.functions.name rewards.functions.weight
    rewards.functions.gate rewards.functions.closed rewards.timeout rewards.on_error
    optimizer.learning_rate optimizer.schedule optimizer.warmup_steps optimizer.betas
    optimizer.epsilon optimizer.weight_decay optimizer.max_grad_norm
    checkpoints.every checkpoints.keep trackers.tensorboard trackers.wandb
    data.name data.path data.heldout_path data.group data.columns data.empty data.bad_rows data.raw
    sampled.train sampled.group_size sampled.max_tokens sampled.temperature sampled.noise
    learns centering separator loss beta smoothing evaluation.rows evaluation.prompts
    base.name base.stage base.lora base.lora.rank base.lora.alpha base.lora.targets data.options
    algorithm.preset algorithm.ratio algorithm.entropy
    algorithm.advantage.kind algorithm.advantage.gamma algorithm.advantage.critic_lam
    algorithm.advantage.adaptive_alpha algorithm.advantage.whiten algorithm.advantage.baseline
    algorithm.advantage.steps algorithm.advantage.scale algorithm.advantage.group_baseline
    algorithm.advantage.function algorithm.advantage.options algorithm.advantage.needs_value
    algorithm.advantage.per_token algorithm.weights.kind
    algorithm.surrogate.kind algorithm.surrogate.function algorithm.surrogate.options
    algorithm.divergence algorithm.divergence.beta algorithm.divergence.adaptive
    algorithm.divergence.adaptive.rule algorithm.divergence.adaptive.target
    algorithm.value algorithm.value.coefficient algorithm.correction algorithm.correction.kind
    algorithm.correction.level algorithm.correction.cap
    rollout.prompts_per_step rollout.group_size rollout.max_tokens rollout.temperature
    rollout.top_k rollout.top_p rollout.min_p rollout.stop rollout.stop_ids
    rollout.dynamic_sampling rollout.mask_truncated rollout.soft_overlong rollout.old_log_probs
    rollout.engine rollout.max_rows rollout.timeout rollout.ahead value.optimizer
"""
ALWAYS: Final = frozenset(_ALWAYS.split())
