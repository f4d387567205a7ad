"""Uploads by a kernel against torch's own copies, also while a GPU is busy."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from kvrelay.kernels.uploads import Uploads, copy_words


@pytest.mark.parametrize("count", [1, 1023, 1024, 5000])
def test_words_are_copied_and_nothing_beside_them(count, device):
    source = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    target = torch.full((count + 7,), -1, dtype=torch.int32, device=device)
    copy_words(source.pin_memory() if device.type == "cuda" else source, target[:count])
    assert torch.equal(target[:count].cpu(), source)
    assert (target[count:] == -1).all()


@pytest.mark.gpu
def test_an_upload_passes_a_load_that_keeps_the_copy_engine_busy():
    load = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    room, beside = torch.empty_like(load, device="cuda"), torch.cuda.Stream()
    uploads, words = Uploads(torch.device("cuda")), torch.arange(64, dtype=torch.int32).pin_memory()
    assert uploads.send(words).tolist() == [*range(64)]  # compiled
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        for _ in range(8):
            room.copy_(load, non_blocking=True)
    uploads.send(words)
    torch.cuda.current_stream().synchronize()
    assert not beside.query()


@pytest.mark.gpu
def test_what_the_gpu_has_not_read_yet_keeps_its_memory():
    uploads = Uploads(torch.device("cuda"))
    torch.cuda._sleep(10**8)
    sent = [
        uploads.send(torch.full((512,), number, dtype=torch.int32).pin_memory())
        for number in range(200)
    ]
    assert [int(words.unique()) for words in sent] == [*range(200)]
    uploads.send(torch.zeros(1, dtype=torch.int32).pin_memory())
    assert len(uploads._unread) == 1
