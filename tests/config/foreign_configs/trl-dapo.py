from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment

training_args = GRPOConfig(
    mask_truncated_completions=True,
    loss_type="dapo",
    epsilon_high=0.28,
    epsilon=0.2,
    per_device_train_batch_size=512,
    num_generations=16,
    max_completion_length=20480,
    beta=0.0,
    top_entropy_quantile=0.2,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-32B",
    args=training_args,
    reward_funcs=[accuracy_reward, get_soft_overlong_punishment(20480, 4096)],
)
