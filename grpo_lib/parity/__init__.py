"""Comparisons that end in a verdict."""
