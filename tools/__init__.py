"""Commands that are run from the repository root as ``python -m tools.<name>``."""
