"""Blocks that are taken and never written, and the holes that they leave."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from keel.preflight.memory.heap import Heap, heap
from keel.preflight.memory.machine import resident

MIB = 2**20

NAME, VERSION = platform.libc_ver()
GLIBC = NAME == "glibc" and tuple(map(int, VERSION.split("."))) >= (2, 33)

pytestmark = pytest.mark.skipif(
    not GLIBC or bool(os.environ.get("LD_PRELOAD")), reason="malloc is not glibc's"
)


@pytest.fixture
def found() -> Heap:
    here = heap()
    assert here is not None
    return here


def test_a_block_is_counted_until_it_is_given_back_and_never_written(found: Heap) -> None:
    taken, used, before = found.taken, found.used, resident()
    # Larger than any hole that earlier tests may have left in the heap.
    sizes = (256 * MIB, 320 * MIB)
    blocks = [found.take(size) for size in sizes]
    assert all(block % 64 == 0 for block in blocks)
    assert all(blocks)
    # A page of each is written by malloc itself.
    assert sum(sizes) <= found.used - used < sum(sizes) + MIB
    assert sum(sizes) <= found.taken - taken < sum(sizes) + MIB
    assert before is not None
    assert (resident() or 0) - before < 4 * MIB
    for block, size in zip(blocks, sizes, strict=True):
        found.give(block, size)
    assert found.used - used < MIB
    assert found.taken - taken < MIB


def test_a_hole_is_taken_but_not_used(found: Heap) -> None:
    # Behind a freed block of 16 KiB lies one that stays: the heap keeps the hole.
    size, used, taken = 16 * 1024, found.used, found.taken
    blocks = [found.take(size) for _ in range(400)]
    for block in blocks[::2]:
        found.give(block, size)
    assert 200 * size <= found.used - used < 220 * size
    assert found.taken - found.used >= 190 * size
    for block in blocks[1::2]:
        found.give(block, size)
    assert found.taken >= taken - 64 * MIB


def test_what_malloc_refuses_is_counted_all_the_same(found: Heap) -> None:
    before = found.taken
    block = found.take(2**60)
    assert block == 0
    assert found.taken - before >= 2**60
    found.give(block, 2**60)
    assert found.taken - before < MIB
    assert found.take(0) == 0


def test_none_where_address_space_counts_as_memory(tmp_path: Path) -> None:
    kernel = tmp_path / "overcommit_memory"
    for said, there in (("2\n", False), ("0\n", True), ("1\n", True)):
        kernel.write_text(said)
        assert (heap(kernel) is not None) == there
    assert heap(tmp_path / "missing") is None
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33));"
        "from keel.preflight.memory.heap import heap; print(heap())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


TWO = """
import json, os, random, sys
import torch
from keel.config.model import Model
from keel.models.policy import load_policy
from keel.preflight.memory.heap import heap
from keel.preflight.memory.ledger import DryRun, Ledger
from keel.preflight.memory.passes import Extent, Twins, learn

class Watch(Ledger):
    '''The real pass: no block beside each tensor, but what malloc has is looked at.'''

    def note(self, tensor):
        super().note(tensor)
        self.top = max(self.top, self.own.taken)

torch.set_num_threads(1)
# Room that products keep from their first use on, no tensor's: larger than any below asks for.
torch.ones(1024, 1024) @ torch.ones(1024, 1024)
build = {"family": "llama", "hidden_size": 256, "layers": 4, "heads": 4, "context": 256}
policy = load_policy(Model.model_validate({"build": build}), 0)
own = heap()

def passes(twins):
    for lengths in ((200, 150, 170), (250, 120), (200, 150, 170), (250, 120)):
        rows = [(Extent(5, length - 5),) for length in lengths]
        said = learn(twins, rows, temperature=1.0, full=False, pairs=False)
        torch.autograd.backward([value.sum() for value in said])
        del said

def real():
    watch = Watch()
    watch.own, before = own, own.used
    with watch:
        passes(Twins(policy))
    return watch.top - before, 0

def dry():
    run = DryRun()
    twins, before = Twins(run.twin(policy)), own.used
    with run.running(own) as ledger:
        passes(twins)
    return ledger.top - before, ledger.peak - sum(p.nbytes for p in policy.parameters())

def shuffle(seed):
    some = random.Random(seed)
    blocks = [(own.take(size), size) for size in some.choices(range(16, 20000), k=100)]
    for block in blocks[::2]:
        own.give(*block)

for seed in range(3):
    for name, what in (("real", real), ("dry", dry)):
        sys.stdout.flush()
        if not os.fork():
            shuffle(seed)
            print(name, json.dumps(what()), flush=True)
            os._exit(0)
        os.wait()
"""


@pytest.mark.slow
def test_malloc_loses_in_the_dry_run_what_it_loses_in_the_real_one() -> None:
    done = subprocess.run([sys.executable, "-c", TWO], capture_output=True, text=True, check=True)
    said = [line.split(" ", 1) for line in done.stdout.splitlines()]
    real, dry = (
        [json.loads(figures) for name, figures in said if name == asked]
        for asked in ("real", "dry")
    )
    assert len(real) == len(dry) == 3
    taken = sum(top for top, _ in real)
    # What lives alone is a fifth short.
    assert sum(live for _, live in dry) < 0.87 * taken
    # Where a hole forms hangs on small things too, and those of fake tensors are not the same. One
    # heap's real pass differs from that of another, or from its own repeated, by up to a tenth;
    # dry over real was 0.93 to 1.12 for one, of three together 0.98 to 1.08.
    assert sum(top for top, _ in dry) == pytest.approx(taken, rel=0.12)
