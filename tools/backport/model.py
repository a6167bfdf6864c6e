"""What an edit is: its places in a release, and when each of them applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.backport.changes import Change
from tools.backport.tree import Tree

LAYER_WISE = "optimizer/layer_wise_optimizer.py"
OPTIMIZER = "optimizer/optimizer.py"
BUFFER = "distributed/param_and_grad_buffer.py"

LEGACY_ONLY = "this release has the legacy layer-wise path only"


class Code:
    """The three files of a release, without any of this tool's edits."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self.trees = trees

    def defines(self, path: str, scope: str) -> bool:
        """Whether the file has a function or class of this dotted name."""
        return self.trees[path].scope(scope) is not None

    def says(self, path: str, scope: str, statement: str) -> bool:
        """Whether that function has exactly one statement (or header) with this code."""
        found = self.trees[path].scope(scope)
        return found is not None and found.find(statement) is not None

    @property
    def has_layouts(self) -> bool:
        """Whether the release can lay parameters out for the layer-wise optimizer."""
        return self.defines(LAYER_WISE, "tag_params_for_buffer_routing")


def _always(code: Code) -> bool:
    return True


@dataclass(frozen=True)
class Site:
    """One place that an edit changes.

    Attributes:
        path: File, relative to ``megatron/core``.
        scope: Dotted name of the function or class; empty for the module.
        what: What changes there, in a few words.
        change: How.
        when: Whether this place needs the change, seen from the code's shape.
    """

    path: str
    scope: str
    what: str
    change: Change
    when: Callable[[Code], bool] = _always


@dataclass(frozen=True)
class Edit:
    """One of the edits of the fix.

    Attributes:
        name: What reports call it.
        does, why: What it does, and what goes wrong without it: two sentences of the commit
            message.
        sites: Its places.
        relies_on: Functions that it leaves alone but whose code it takes for granted.
        marks: Names that the fix gives, by which another's version of it is recognised.
        needs_layouts: Whether it concerns only releases with layer-wise layouts.
        on_demand: Whether it is made only when asked for.
    """

    name: str
    does: str
    why: str
    sites: tuple[Site, ...]
    relies_on: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()
    needs_layouts: bool = True
    on_demand: bool = False

    @property
    def functions(self) -> tuple[tuple[str, str], ...]:
        """Path and name of every scope whose code this edit has to know.

        Those of sites that a release does not need count too: that it does not is read from them.
        """
        return tuple(
            dict.fromkeys((*((site.path, site.scope) for site in self.sites), *self.relies_on))
        )
