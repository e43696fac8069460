"""Command line: one verb per file."""
