"""Every change finds one place, changes whole lines there, and undoes itself byte for byte."""

import pytest

from tools.backport.changes import Change, Insert, Replace, Supersede, apply_splices
from tools.backport.tree import Scope, Tree, UnknownCode

SOURCE = '''"""A module."""

import os


class Buffer:
    def start(self, force):
        # Why it may start.
        assert self.ready or force  # always
        if (
            force
        ):
            # A comment that belongs to the body.
            wait()
        size = len(
            self.buckets
        )
        for bucket in self.buckets:
            bucket.go()
        return size


def partition(
    buffers,
):
    """Groups."""
    return [buffers]
'''

INSERT_AFTER = Insert("bucket.go()", "# New.\nbucket.stop()")
INSERT_BEFORE = Insert("if (\n    force\n):", "stage()\n", where="before")
INSERT_ABOVE = Insert("wait()", "# One more reason.", where="above")
REPLACE_STATEMENT = Replace("size = len(\n    self.buckets\n)", "size = 0\nsize += 1")
REPLACE_HEADER = Replace("if (\n    force\n):", "if force and (\n    self.late\n):")
SUPERSEDE = Supersede(
    "partition", "_partition_one", "\n\ndef partition(buffers):\n    return _partition_one(buffers)"
)
CHANGES: list[tuple[Change, str]] = [
    (INSERT_AFTER, "Buffer.start"),
    (INSERT_BEFORE, "Buffer.start"),
    (INSERT_ABOVE, "Buffer.start"),
    (REPLACE_STATEMENT, "Buffer.start"),
    (REPLACE_HEADER, "Buffer.start"),
    (SUPERSEDE, ""),
    (Insert("def start", "\ndef stop(self):\n    pass"), "Buffer"),
]


def made(source: str, change: Change, name: str) -> str:
    tree = Tree(source)
    splice = change.make(tree, scope_of(tree, name))
    assert splice is not None
    return apply_splices(tree, [splice])


def undone(source: str, change: Change, name: str) -> str:
    tree = Tree(source)
    splice = change.undo(tree, scope_of(tree, name))
    assert splice is not None
    return apply_splices(tree, [splice])


def scope_of(tree: Tree, name: str) -> Scope:
    scope = tree.scope(name)
    assert scope is not None
    return scope


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_change_undoes_itself_and_keeps_every_other_line(
    change: Change, name: str, newline: str
) -> None:
    source = SOURCE.replace("\n", newline)
    after = made(source, change, name)
    assert after != source
    compile(after, "after", "exec")
    assert undone(after, change, name) == source
    kept = [line for line in source.splitlines(True) if line in after.splitlines(True)]
    assert len(kept) >= len(source.splitlines()) - 3
    assert after.count("\n") == after.count(newline)


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_change_that_is_not_there_is_not_undone(change: Change, name: str) -> None:
    tree = Tree(SOURCE)
    assert change.undo(tree, scope_of(tree, name)) is None


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_change_altered_by_hand_is_not_undone(change: Change, name: str) -> None:
    tree = Tree(
        made(SOURCE, change, name)
        .replace("bucket.stop()", "bucket.stop(1)")
        .replace("stage()", "stage(1)")
        .replace("One more", "Another")
        .replace("size += 1", "size += 2")
        .replace("self.late", "self.later")
        .replace("return _partition_one", "return 1 or _partition_one")
        .replace("    pass", "    return")
    )
    assert change.undo(tree, scope_of(tree, name)) is None


def test_all_changes_of_a_file_are_made_and_undone_at_once() -> None:
    changes = [pair for pair in CHANGES if pair[0] is not INSERT_BEFORE]
    tree = Tree(SOURCE)
    splices = [change.make(tree, scope_of(tree, name)) for change, name in changes]
    after = Tree(apply_splices(tree, [splice for splice in splices if splice]))
    back = [change.undo(after, scope_of(after, name)) for change, name in changes]
    assert all(back)
    assert apply_splices(after, [splice for splice in back if splice]) == SOURCE


def test_code_goes_to_its_place() -> None:
    assert (
        "            bucket.go()\n            # New.\n            bucket.stop()\n        return"
        in (made(SOURCE, INSERT_AFTER, "Buffer.start"))
    )
    assert "# always\n        stage()\n\n        if (" in made(
        SOURCE, INSERT_BEFORE, "Buffer.start"
    )
    assert "the body.\n            # One more reason.\n            wait()" in (
        made(SOURCE, INSERT_ABOVE, "Buffer.start")
    )
    assert "self.late\n        ):\n            # A comment" in (
        made(SOURCE, REPLACE_HEADER, "Buffer.start")
    )


def test_comments_stay_with_the_statement_below_them() -> None:
    before = Insert("assert self.ready or force  # always", "stage()", where="before")
    assert "        stage()\n        # Why it may start.\n" in made(SOURCE, before, "Buffer.start")


def test_a_place_that_is_there_twice_is_no_place() -> None:
    source = SOURCE.replace("        return size", "        bucket.go()\n        return size")
    tree = Tree(source)
    assert INSERT_AFTER.make(tree, scope_of(tree, "Buffer.start")) is None


def test_changes_of_the_same_lines_are_refused() -> None:
    tree = Tree(SOURCE)
    scope = scope_of(tree, "Buffer.start")
    splices = [REPLACE_HEADER.make(tree, scope), Insert("wait()", "x()", "above").make(tree, scope)]
    assert all(splices)
    apply_splices(tree, [splice for splice in splices if splice])
    with pytest.raises(ValueError, match="two edits change line"):
        apply_splices(tree, [splices[0], splices[0]])  # type: ignore[list-item]


def test_comments_and_blank_lines_do_not_change_a_fingerprint() -> None:
    plain = scope_of(Tree(SOURCE), "Buffer.start").fingerprint
    commented = SOURCE.replace("# Why it may start.", "# Another reason.\n\n").replace(
        "  # always", ""
    )
    assert scope_of(Tree(commented), "Buffer.start").fingerprint == plain


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("            wait()", "            wait(1)"),
        ("            bucket.go()\n", ""),
        ("            bucket.go()", "        bucket.go()\n            pass"),
        ("self.ready or force", "force or self.ready"),
        ("(self, force)", "(self, force=True)"),
    ],
)
def test_code_does_change_a_fingerprint(old: str, new: str) -> None:
    damaged = SOURCE.replace(old, new)
    assert damaged != SOURCE
    try:
        tree = Tree(damaged)
    except UnknownCode:
        return
    plain = scope_of(Tree(SOURCE), "Buffer.start").fingerprint
    assert scope_of(tree, "Buffer.start").fingerprint != plain


def test_what_is_not_python_is_named_with_its_line() -> None:
    with pytest.raises(UnknownCode, match="not Python") as caught:
        Tree("x = 1\nif:\n    pass\n")
    assert caught.value.line == 2
