"""Pure GRPO mathematics: tensors in, tensors out, no processes and no files."""
