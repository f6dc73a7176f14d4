"""GRPO post-training pipeline; docs/architecture.md is the map."""
