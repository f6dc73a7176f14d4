"""Judges of completions, run in killable processes."""
