"""Reads a release and says of every edit whether it is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tools.backport.changes import Splice, apply_splices
from tools.backport.edits import EDITS
from tools.backport.known import KNOWN_FUNCTIONS
from tools.backport.model import BUFFER, LAYER_WISE, LEGACY_ONLY, OPTIMIZER, Code, Edit, Site
from tools.backport.tree import Tree, UnknownCode

PATHS = (LAYER_WISE, BUFFER, OPTIMIZER)


class State(Enum):
    """What a report says of an edit."""

    PRESENT = "present"
    MISSING = "missing"
    NOT_APPLICABLE = "not applicable"
    UNKNOWN = "unknown code"


@dataclass(frozen=True)
class Place:
    """A place in a file; ``line`` counts from 1 and is 0 where the whole file is meant."""

    path: str
    line: int
    note: str


@dataclass(frozen=True)
class Finding:
    """The state of one edit, with the places that show it."""

    edit: Edit
    state: State
    places: tuple[Place, ...]


class NotAMegatronCore(ValueError):
    """The path holds no Megatron-core."""


def find_core(path: Path) -> Path:
    """The ``megatron/core`` folder of a checkout, of an unpacked wheel or of an installation.

    Args:
        path: That folder itself, or one that holds it as ``megatron/core`` or ``core``.

    Raises:
        NotAMegatronCore: If there is none.
    """
    for folder in (path, path / "core", path / "megatron" / "core"):
        if all((folder / name).is_file() for name in (BUFFER, OPTIMIZER)):
            return folder
    hint = "; unpack the wheel first" if path.suffix == ".whl" else ""
    raise NotAMegatronCore(
        f"{path} is no Megatron-LM checkout, unpacked wheel or megatron/core folder: "
        f"it has no megatron/core/{BUFFER}{hint}"
    )


def read_source(file: Path) -> str:
    """The text of a file, so that writing it back in UTF-8 gives the same bytes.

    Raises:
        NotAMegatronCore: If it is not UTF-8.
    """
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotAMegatronCore(f"{file} is not UTF-8: {error.reason}") from None


class Survey:
    """The files of one release, as they are and as they were before this tool's edits.

    Attributes:
        sources: The text of every file, by its path relative to ``megatron/core``.
        original: The same without this tool's edits.
        made: The sites that are there.
        findings: One per edit, in their order.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        edits: Sequence[Edit] = EDITS,
        known: Mapping[str, Mapping[str, Mapping[str, str]]] = KNOWN_FUNCTIONS,
    ) -> None:
        """Surveys sources.

        Args:
            sources: Text by path relative to ``megatron/core``.
            edits: The edits to look for.
            known: Digests of known code, as in :data:`KNOWN_FUNCTIONS`.
        """
        self.sources = sources
        self._edits, self._known = edits, known
        self.made: list[Site] = []
        self.original: dict[str, str] = {}
        self._trees: dict[str, Tree] = {}
        self._problems: list[Place] = []
        for path, source in sources.items():
            try:
                self._trees[path] = Tree(source)
                self.original[path] = self._without_edits(path)
            except UnknownCode as problem:
                self._problems.append(Place(path, problem.line or 0, str(problem)))
        self._problems += [
            Place(path, 0, "this file is missing") for path in PATHS if path not in sources
        ]
        if not self._problems:
            self._code = Code({path: Tree(text) for path, text in self.original.items()})
        self.findings = tuple(self._finding(edit) for edit in edits)

    @classmethod
    def of(cls, core: Path) -> Survey:
        """Reads the files of the release at ``core``, a ``megatron/core`` folder."""
        files = {path: core / path for path in PATHS}
        return cls({p: read_source(f) for p, f in files.items() if f.is_file()})

    def finding(self, edit: Edit) -> Finding:
        """The finding about this edit."""
        return next(finding for finding in self.findings if finding.edit is edit)

    def fingerprints(self) -> dict[tuple[str, str], str]:
        """Digest of every function that an edit touches or relies on, by path and name."""
        if self._problems:
            return {}
        return {
            (path, name): scope.fingerprint
            for edit in self._edits
            if self._code.has_layouts or not edit.needs_layouts
            for path, name in edit.functions
            if (scope := self._code.trees[path].scope(name)) and scope.is_function
        }

    def with_edits(self, edits: Iterable[Edit]) -> dict[str, str]:
        """The text of every file with exactly these edits.

        Raises:
            UnknownCode: If the code of one of them is not known.
        """
        wanted: dict[str, list[Splice]] = {path: [] for path in PATHS}
        for edit in edits:
            finding = self.finding(edit)
            if finding.state is State.UNKNOWN:
                raise UnknownCode(f"{edit.name}: {finding.places[0].note}")
            for site in self._sites(edit) if finding.state is not State.NOT_APPLICABLE else ():
                splice = _splice(site, self._code.trees[site.path], undo=False)
                if splice is None:
                    raise UnknownCode(f"{edit.name}: no place for '{site.what}' in {site.path}")
                wanted[site.path].append(splice)
        return {path: apply_splices(self._code.trees[path], wanted[path]) for path in PATHS}

    def _without_edits(self, path: str) -> str:
        tree, splices = self._trees[path], []
        for edit in self._edits:
            for site in edit.sites:
                splice = _splice(site, tree, undo=True) if site.path == path else None
                if splice is not None:
                    self.made.append(site)
                    splices.append(splice)
        return apply_splices(tree, splices)

    def _sites(self, edit: Edit) -> list[Site]:
        return [site for site in edit.sites if site.when(self._code)]

    def _finding(self, edit: Edit) -> Finding:
        if self._problems:
            return Finding(edit, State.UNKNOWN, tuple(self._problems))
        if edit.needs_layouts and not self._code.has_layouts:
            return Finding(edit, State.NOT_APPLICABLE, (Place(LAYER_WISE, 0, LEGACY_ONLY),))
        sites = self._sites(edit)
        problems = [*self._strange_functions(edit), *self._lost_places(sites)]
        missing = [site for site in sites if site not in self.made]
        if missing and len(missing) < len(sites):
            problems += [
                Place(
                    site.path, self._line(site), f"only part of the edit is there: no {site.what}"
                )
                for site in missing
            ]
        if problems:
            return Finding(edit, State.UNKNOWN, tuple(problems))
        state = State.MISSING if missing else State.PRESENT
        places = tuple(Place(site.path, self._line(site), site.what) for site in sites)
        return Finding(edit, state, places)

    def _strange_functions(self, edit: Edit) -> list[Place]:
        strange = []
        for path, name in edit.functions:
            scope = self._code.trees[path].scope(name)
            known = self._known.get(path, {}).get(name, {})
            if scope is None:
                strange.append(Place(path, 0, f"{name} is not there"))
            elif scope.is_function and scope.fingerprint not in known:
                here = self._trees[path].scope(name)
                releases = ", ".join(known.values())
                note = f"the code of {name} is none of those that this tool knows ({releases})"
                marks = [mark for mark in edit.marks if mark in self.sources[path]]
                if marks:
                    note += f"; the file names {marks[0]}, so it may have a fix of its own"
                strange.append(Place(path, here.line if here else 0, note))
        return strange

    def _lost_places(self, sites: list[Site]) -> list[Place]:
        return [
            Place(site.path, 0, f"no place for '{site.what}' in {site.scope or 'the module'}")
            for site in sites
            if self._code.trees[site.path].scope(site.scope)
            and _splice(site, self._code.trees[site.path], undo=False) is None
        ]

    def _line(self, site: Site) -> int:
        """Where the site is, or would be, in the file as it is now."""
        tree = self._trees[site.path]
        splice = _splice(site, tree, undo=site in self.made)
        return splice.start + 1 if splice else 0


def _splice(site: Site, tree: Tree, undo: bool) -> Splice | None:
    scope = tree.scope(site.scope)
    if scope is None:
        return None
    return site.change.undo(tree, scope) if undo else site.change.make(tree, scope)
