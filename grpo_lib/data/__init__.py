"""Prompts, chat templates and Parquet shards."""
