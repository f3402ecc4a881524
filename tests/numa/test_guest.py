"""Cores and memory of ranks in a machine with two NUMA nodes, emulated by QEMU; slow, run by `make test-numa`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import guest  # noqa: E402  (beside this file)

pytestmark = pytest.mark.numa
PAGES = re.compile(r"rank (\d) on CPUs \[(.*)\]: get_mempolicy (.*); move_pages: \{(.*)\} pages by domain")


@pytest.fixture(scope="module")
def blocks():
    """What each command printed, in order."""
    lacking = guest.missing()
    if lacking:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"missing: {', '.join(lacking)}")
    text = guest.run(Path(os.environ["GUEST_KERNEL"]) if "GUEST_KERNEL" in os.environ else None)
    found = text.split("$ mpirun ")[1:]
    assert len(found) == 4 and all("(exit code 0)" in block for block in found), text
    return found


def pages(block):
    """(CPUs, policy, {domain: pages}) of each rank."""
    return [(cpus, policy, {int(word.split(":")[0]): int(word.split(":")[1]) for word in counts.split(",")})
            for _, cpus, policy, counts in sorted(PAGES.findall(block))]


@pytest.mark.parametrize("block, expected", [
    (0, [("0", 0), ("1", 0), ("2", 1), ("3", 1)]), (1, [("0, 1", 0), ("2, 3", 1)])])
def test_every_page_of_a_rank_lies_in_its_domain(blocks, block, expected):
    for (cpus, policy, counts), (wanted, domain) in zip(pages(blocks[block]), expected, strict=True):
        assert cpus == wanted and policy == f"MPOL_BIND ({domain},)" and list(counts) == [domain]
    assert "warning" not in blocks[block]


def test_one_rank_over_both_is_told_so(blocks):
    assert pages(blocks[2])[0][1] == "MPOL_BIND (0, 1)"
    assert "warning: local rank(s) 0: cores in several of the NUMA domains 0-1" in blocks[2]


def test_no_pin_binds_nothing(blocks):
    assert [(cpus, policy) for cpus, policy, _ in pages(blocks[3])] == [("0, 1, 2, 3", "policy 0")] * 4
