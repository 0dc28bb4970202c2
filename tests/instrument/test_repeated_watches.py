"""A process that is watched many times: nothing of an earlier block is kept, called, or piled up."""

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import dtypedoctor
from dtypedoctor import unpatched


def test_blocks_leave_neither_hooks_nor_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that cannot be taken back are there once; what the blocks listened with is gone with them."""
    hooks: list[object] = []
    before = unpatched._add_audit_hook.cache_info().currsize
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    unpatched._add_audit_hook.cache_clear()
    already = {when: len(unpatched._living(when)) for when in unpatched._listening}
    model = nn.Linear(2, 2)
    blocks = []
    for number in range(4):
        with dtypedoctor.watch(model, out=tmp_path / str(number)) as block:
            model(torch.ones(1, 2))
        blocks.append(weakref.ref(block._watched))
        del block
    if not before:  # what is in the cache is a hook that was never added: later tests in this process need one
        unpatched._add_audit_hook.cache_clear()
    gc.collect()
    assert len(hooks) == 1
    assert [block() for block in blocks[:-1]] == [None, None, None]
    assert all(len(unpatched._living(when)) <= already[when] for when in unpatched._listening)
    assert not model._forward_hooks
