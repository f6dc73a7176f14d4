"""Content-addressed artifacts."""
