"""Classic control: Q-learning and policy gradients. The only package that imports gymnasium."""
