"""The text that is trained on when no data is given: Python's own documentation.

``pydoc_data.topics`` holds chapters of the English language reference and comes with CPython. Some
paragraphs are in several chapters; they are kept in the first alone, so that nothing is evaluated on
that was trained on. What is left is about 370,000 characters. Of every chapter the end is held out:
its last twentieth for test, the twentieth before for validation, cut between paragraphs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil

from megatron.core.tokenizers import MegatronTokenizerBase

from .files import default_cache_folder, make_cache_folder, one_builder, temporary_path
from .indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from .utils import Blend, Split

_TRAINED_ON = 0.90
_VALIDATED_ON = 0.95
# Shorter paragraphs ("See also:") say nothing that could be learnt by heart.
_REPEATABLE = 64
# Part of the folder's name; to be raised when the same chapters are cut or stored otherwise.
_VERSION = 1


def default_text_blend_per_split(
    tokenizer: MegatronTokenizerBase, path_to_cache: str | None = None
) -> list[Blend]:
    """Returns the default text as a blend for each split, tokenized on first use.

    Any number of processes may ask for it at the same time.

    Args:
        tokenizer: Any that takes English text.
        path_to_cache: Folder for the token files; by default the user's cache folder.

    Returns:
        What ``GPTDatasetConfig.blend_per_split`` takes.

    Raises:
        ImportError: If this Python comes without its documentation.
        ValueError: If the tokenizer cannot take text.
        OSError: If there is no folder that the files can be written to.
    """
    chapters = _without_repetitions(_chapters())
    cache = path_to_cache or default_cache_folder()
    if cache is None:
        raise OSError("no cache folder can be written to; choose one with --data-cache-path")
    identity = json.dumps([_VERSION, tokenizer.unique_identifiers, chapters], sort_keys=True)
    name = f"default-text-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    folder = os.path.join(cache, name)
    if not _is_complete(folder):
        make_cache_folder(cache)
        with one_builder(folder):
            if not _is_complete(folder):
                _build(folder, chapters, tokenizer)
    return [([_prefix(folder, split)], None) for split in Split]


def _chapters() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ImportError(
            "this Python comes without its documentation (pydoc_data.topics), which is the default "
            "text; give --data-path or --mock-data"
        ) from None
    return [topics[name] for name in sorted(topics)]


def _without_repetitions(chapters: list[str]) -> list[str]:
    """Returns the chapters with paragraphs that they share left in the first alone."""
    seen: set[str] = set()
    kept = []
    for chapter in chapters:
        paragraphs = []
        for paragraph in chapter.split("\n\n"):
            said = " ".join(paragraph.split())
            if len(said) < _REPEATABLE or said not in seen:
                paragraphs.append(paragraph)
            seen.add(said)
        kept.append("\n\n".join(paragraphs))
    return kept


def _prefix(folder: str, split: Split) -> str:
    return os.path.join(folder, split.name)


def _is_complete(folder: str) -> bool:
    try:
        return all(len(IndexedDataset(_prefix(folder, split))) > 0 for split in Split)
    except (FileNotFoundError, ValueError):
        return False


def _build(folder: str, chapters: list[str], tokenizer: MegatronTokenizerBase) -> None:
    """Writes the files into a folder of their own, which then gets its name."""
    temporary = temporary_path(folder)
    os.mkdir(temporary)
    try:
        for split in Split:
            prefix = _prefix(temporary, split)
            dtype = DType.optimal_dtype(tokenizer.vocab_size)
            with IndexedDatasetBuilder(get_bin_path(prefix), dtype) as builder:
                for chapter in chapters:
                    if text := _part(chapter, split):
                        builder.add_item([*_tokenize(tokenizer, text), tokenizer.eod])
                        builder.end_document()
                builder.finalize(get_idx_path(prefix))
        # Where files cannot be locked, another process may have been faster: a folder is replaced
        # only if it is damaged, and whoever has its files open keeps them.
        if not _renamed(temporary, folder) and not _is_complete(folder):
            damaged = temporary_path(folder)
            os.rename(folder, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _renamed(source: str, target: str) -> bool:
    """Renames a folder; false if there is one of that name, with files in it."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _tokenize(tokenizer: MegatronTokenizerBase, text: str) -> list[int]:
    try:
        return tokenizer.tokenize(text)
    except ValueError as error:
        raise ValueError(
            f"the default text cannot be tokenized by {type(tokenizer).__name__} ({error}); give "
            "--data-path or --mock-data"
        ) from None


def _part(chapter: str, split: Split) -> str:
    """Returns the paragraphs of a chapter that belong to a split."""
    kept, start = [], 0
    for paragraph in chapter.split("\n\n"):
        place = start / len(chapter)
        owner = Split((place >= _TRAINED_ON) + (place >= _VALIDATED_ON))
        if owner is split:
            kept.append(paragraph)
        start += len(paragraph) + 2
    return "\n\n".join(kept).strip("\n")
