"""The training loop, its command line, and how a job starts, reports and fails."""
