"""The edits of the fix, one module each, in the order in which reports list them."""

from tools.backport.edits import (
    layer_wise_optimizer,
    legacy_parity,
    partitioning,
    seeding,
    staging,
)
from tools.backport.model import Edit

EDITS: tuple[Edit, ...] = (
    layer_wise_optimizer.EDIT,
    staging.EDIT,
    partitioning.EDIT,
    seeding.EDIT,
    legacy_parity.EDIT,
)

__all__ = ["EDITS"]
