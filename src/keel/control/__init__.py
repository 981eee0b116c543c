"""Classic control: Q-learning and policy gradients on Gymnasium; the one door to gymnasium."""
