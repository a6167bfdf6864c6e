"""Every cause that is put back shows, in the comparison of ON with OFF and in what is said."""

import pytest

from tests.functional_tests.mutation_table import outcome

# Mutation, overlap: is ON still OFF, and part of what the audit or the run says.
EXPECTED = {
    ("none", False): (True, ""),
    ("none", True): (True, ""),
    ("a_staging", True): (False, "is not what its owner computed"),
    ("a_flag", False): (False, "MXFP8Tensor"),
    ("b", False): (False, "is not what its owner computed"),
    # With overlap each group is gathered after both owners have stepped: this hid the bug.
    ("b", True): (True, ""),
    ("c", False): (False, "still holds the values that it was quantised from"),
    ("c", True): (False, "still holds the values that it was quantised from"),
    # Without overlap the buffer is zeroed between the gather and the next backward pass.
    ("zeroing", False): (True, ""),
    ("zeroing", True): (False, ""),
    ("order", False): (False, "is not what its owner computed"),
    ("order", True): (False, "is not what its owner computed"),
    ("gather", True): (False, "is not what its owner computed"),
    ("ties", False): (False, "lay their parameters out differently"),
}


@pytest.mark.parametrize(("name", "overlap"), EXPECTED)
def test_what_is_undone_is_seen(name, overlap):
    equal, said = EXPECTED[name, overlap]
    got = outcome(name, overlap)
    assert got.equal == equal
    assert said in got.audit + got.error
    assert bool(said) == bool(got.audit + got.error)


def test_the_audit_speaks_on_the_first_step_after_the_cause():
    for name in ("a_staging", "c"):
        assert outcome(name, True).audit.startswith("step 1: ")
