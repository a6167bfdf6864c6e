"""A source file as LibCST sees it: functions by name, statements by their code, places by line.

Edits need three things of a syntax tree, and this module gives no more: where a statement is,
what a function says apart from its comments, and whether the whole still parses. Text is cut and
joined by whole lines, so that every byte outside an edit stays what it was.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any


class MissingLibCST(RuntimeError):
    """The optional dependency of this tool is not installed."""


class UnknownCode(ValueError):
    """The code is not what the tool knows.

    Attributes:
        line: 1-based line of the file, or None where the whole file is meant.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Statement:
    """Where a statement stands. Line numbers count from 0 and ends are exclusive.

    Attributes:
        code: Text of a simple statement, or of a compound statement's header, at indentation 0;
            ``def name`` for a function, ``class name`` for a class.
        comments: First line of the comment block right above; ``start`` where there is none.
        start: First line of the statement, its decorators included.
        header: First line of the header.
        header_end: Line after the header; ``end`` for a simple statement.
        end: Line after the statement.
        indent: Its indentation.
    """

    code: str
    comments: int
    start: int
    header: int
    header_end: int
    end: int
    indent: str


class Scope:
    """A function, class or module: ``statements`` holds all inside it, nested ones too."""

    def __init__(self, node: Any, own: Statement | None, statements: list[Statement]) -> None:
        self._node = node
        self.own = own
        self.statements = statements

    @property
    def line(self) -> int:
        """Its first line in the file, from 1."""
        return self.own.header + 1 if self.own else 1

    @property
    def is_function(self) -> bool:
        return self.own is not None and self.own.code.startswith("def ")

    def find(self, code: str) -> Statement | None:
        """The one statement with this code; None where there is none or more than one."""
        found = [statement for statement in self.statements if statement.code == code]
        return found[0] if len(found) == 1 else None

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the code without comments and blank lines."""
        import libcst as cst

        class WithoutComments(cst.CSTTransformer):
            def leave_EmptyLine(
                self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
            ) -> cst.RemovalSentinel:
                return cst.RemoveFromParent()

            def leave_TrailingWhitespace(
                self, original_node: cst.TrailingWhitespace, updated_node: cst.TrailingWhitespace
            ) -> cst.TrailingWhitespace:
                return cst.TrailingWhitespace()

        bare = cst.Module(body=[]).code_for_node(self._node.visit(WithoutComments()))
        return hashlib.sha256(bare.strip().encode()).hexdigest()[:16]


def split_lines(source: str) -> list[str]:
    """The lines with their endings, where Python (unlike ``str.splitlines``) sees line ends."""
    return list(io.StringIO(source, newline=""))


class Tree:
    """A parsed file.

    Attributes:
        lines: Its lines, each with its own line ending.
        newline: The line ending that most of it has.
    """

    def __init__(self, source: str) -> None:
        """Parses ``source``.

        Raises:
            UnknownCode: If it is not Python.
            MissingLibCST: If LibCST is not installed.
        """
        self.lines = split_lines(source)
        self.newline, self._scopes = _parse(source)

    def scope(self, name: str) -> Scope | None:
        """The function or class with this dotted name; the empty name is the module."""
        return self._scopes.get(name)


def _syntax_error(source: str, message: str) -> UnknownCode:
    try:
        compile(source, "source", "exec", dont_inherit=True)
    except SyntaxError as error:  # says more clearly what and where
        return UnknownCode(f"not Python ({error.msg})", error.lineno)
    return UnknownCode(f"not Python that LibCST can read ({message})")


@lru_cache(maxsize=64)
def _parse(source: str) -> tuple[str, dict[str, Scope]]:
    try:
        import libcst as cst
        from libcst.metadata import MetadataWrapper, PositionProvider
    except ImportError as error:
        raise MissingLibCST(
            "tools.backport reads and edits source files with LibCST, which is not installed: "
            "install the optional extra `backport` (pip install '.[backport]')"
        ) from error

    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise _syntax_error(source, error.message) from None
    positions = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    lines = [line.replace("\r\n", "\n") for line in split_lines(source)]
    scopes: dict[str, Scope] = {}

    def place(node: cst.CSTNode) -> Statement:
        span = positions[node]
        start = header = span.start.line - 1
        end = header_end = span.end.line
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            header = positions[node.name].start.line - 1
        if isinstance(node, cst.BaseCompoundStatement) and isinstance(node.body, cst.IndentedBlock):
            header_end = positions[node.body].start.line - 1
            while lines[header_end - 1].lstrip()[:1] in ("", "#"):
                header_end -= 1
        indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            kind = "def" if isinstance(node, cst.FunctionDef) else "class"
            code = f"{kind} {node.name.value}"
        else:
            code = "".join(line.removeprefix(indent) for line in lines[header:header_end]).rstrip()
        comments = start
        while comments and lines[comments - 1].lstrip().startswith("#"):
            comments -= 1
        return Statement(code, comments, start, header, header_end, end, indent)

    def statements_in(node: cst.CSTNode, name: str) -> list[Statement]:
        found: list[Statement] = []
        for child in node.children:
            if isinstance(child, cst.SimpleStatementLine):
                found.append(place(child))
            elif isinstance(child, cst.BaseCompoundStatement):
                own = place(child)
                inner_name = name
                if isinstance(child, cst.FunctionDef | cst.ClassDef):
                    inner_name = f"{name}.{child.name.value}".lstrip(".")
                inner = statements_in(child, inner_name)
                if inner_name != name:
                    scopes.setdefault(inner_name, Scope(child, own, inner))
                found += [own, *inner]
            elif isinstance(child, cst.BaseSuite | cst.Else | cst.Finally | cst.ExceptHandler):
                found += statements_in(child, name)
        return found

    scopes[""] = Scope(module, None, statements_in(module, ""))
    return module.default_newline, scopes
