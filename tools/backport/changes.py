"""The ways in which an edit changes a function, each with its inverse.

A change finds its place by a statement of the syntax tree and adds or replaces whole lines there,
at that statement's indentation. Its inverse finds exactly those lines again. Neither guesses: what
is not there once, word for word, is not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tools.backport.tree import Scope, Statement, Tree


@dataclass(frozen=True)
class Splice:
    """Lines ``start`` to ``end`` (counted from 0, end exclusive) give way to ``lines``."""

    start: int
    end: int
    lines: tuple[str, ...]


class Change(Protocol):
    """One change inside one scope."""

    def make(self, tree: Tree, scope: Scope) -> Splice | None:
        """What to do to code without the change; None where its place is not found."""

    def undo(self, tree: Tree, scope: Scope) -> Splice | None:
        """What to do to code with the change; None where the change is not found."""


def apply_splices(tree: Tree, splices: list[Splice]) -> str:
    """The source after all splices, none of which may overlap."""
    lines = list(tree.lines)
    below = len(lines)
    for splice in sorted(splices, key=lambda each: (each.start, each.end), reverse=True):
        if splice.end > below:
            raise ValueError(f"two edits change line {splice.end}")
        lines[splice.start : splice.end] = splice.lines
        below = splice.start
    return "".join(lines)


def _rendered(code: str, indent: str, tree: Tree) -> tuple[str, ...]:
    return tuple((indent + line if line else "") + tree.newline for line in code.split("\n"))


def _stands_at(tree: Tree, line: int, lines: tuple[str, ...]) -> bool:
    return line >= 0 and tuple(tree.lines[line : line + len(lines)]) == lines


@dataclass(frozen=True)
class Insert:
    """New lines beside the statement ``anchor``.

    Attributes:
        anchor: Code of a simple statement or of a compound statement's header, or ``def name``.
        code: The lines, at indentation 0 and parted by newlines, blank ones included.
        where: ``after`` the statement, ``before`` it and the comments above it, or right
            ``above`` it, under those comments.
    """

    anchor: str
    code: str
    where: str = "after"

    def _line(self, anchor: Statement) -> int:
        return {"after": anchor.end, "before": anchor.comments, "above": anchor.start}[self.where]

    def make(self, tree: Tree, scope: Scope) -> Splice | None:
        anchor = scope.find(self.anchor)
        if anchor is None:
            return None
        line = self._line(anchor)
        return Splice(line, line, _rendered(self.code, anchor.indent, tree))

    def undo(self, tree: Tree, scope: Scope) -> Splice | None:
        anchor = scope.find(self.anchor)
        if anchor is None:
            return None
        lines = _rendered(self.code, anchor.indent, tree)
        if self.where == "after":
            start = anchor.end
        else:
            # Inserted comments are part of the comment block above the anchor.
            places = range(anchor.start - len(lines), anchor.comments - len(lines) - 1, -1)
            start = next((line for line in places if _stands_at(tree, line, lines)), -1)
        return Splice(start, start + len(lines), ()) if _stands_at(tree, start, lines) else None


@dataclass(frozen=True)
class Replace:
    """Other lines in place of the statement ``old``, or of the header that it is."""

    old: str
    new: str

    def make(self, tree: Tree, scope: Scope) -> Splice | None:
        found = scope.find(self.old)
        if found is None:
            return None
        return Splice(found.header, found.header_end, _rendered(self.new, found.indent, tree))

    def undo(self, tree: Tree, scope: Scope) -> Splice | None:
        first = scope.own.start if scope.own else 0
        last = scope.own.end if scope.own else len(tree.lines)
        found: list[Splice] = []
        for line in range(first, last):
            text = tree.lines[line]
            indent = text[: len(text) - len(text.lstrip())]
            lines = _rendered(self.new, indent, tree)
            if _stands_at(tree, line, lines):
                found.append(Splice(line, line + len(lines), _rendered(self.old, indent, tree)))
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class Supersede:
    """A function gets another name, and a new function of the old name follows it.

    Attributes:
        function: The name.
        renamed: What the present function is called from now on.
        code: The new function, with the blank lines that part it from the present one.
    """

    function: str
    renamed: str
    code: str

    def make(self, tree: Tree, scope: Scope) -> Splice | None:
        found = scope.find(f"def {self.function}")
        return None if found is None else self._exchange(tree, found, self.function, self.renamed)

    def undo(self, tree: Tree, scope: Scope) -> Splice | None:
        found = scope.find(f"def {self.renamed}")
        if found is None or not _stands_at(tree, found.end, self._new(tree, found)):
            return None
        return self._exchange(tree, found, self.renamed, self.function)

    def _new(self, tree: Tree, found: Statement) -> tuple[str, ...]:
        return _rendered(self.code, found.indent, tree)

    def _exchange(self, tree: Tree, found: Statement, old: str, new: str) -> Splice:
        header = tree.lines[found.header].replace(f"def {old}(", f"def {new}(", 1)
        kept = (header, *tree.lines[found.header + 1 : found.end])
        if old == self.function:
            return Splice(found.header, found.end, (*kept, *self._new(tree, found)))
        return Splice(found.header, found.end + len(self._new(tree, found)), kept)
