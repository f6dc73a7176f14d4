"""Trainer backends, one heavy dependency each."""
