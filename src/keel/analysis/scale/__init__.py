"""A cost model of reinforcement learning: seconds, bytes and dollars of a step; docs/scale.md."""
