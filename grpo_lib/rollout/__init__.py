"""Rollout engines on vLLM."""
