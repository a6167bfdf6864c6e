"""The parts of ``tools/preprocess_data.py``: reading, tokenizing, showing progress."""
