"""What each flow step does; the only place that chooses implementations."""
