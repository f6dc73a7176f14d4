"""Process groups, barriers and deadlines."""
