"""Batches for the ranks of a job."""
