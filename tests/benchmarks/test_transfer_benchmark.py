"""`python -m benchmarks.transfer`: its figures on tiny transfers, and what it does when there is
nothing to measure.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transfer import Row, Work
from kvrelay.profiling.transfer_end import End
from kvrelay.profiling.transfer_pair import Took
from kvrelay.wire.errors import TransferError

MIB, BLOCK_BYTES = 1 << 20, 65536
KINDS = ["direct", "nixl"] if importlib.util.find_spec("nixl") else ["direct"]


def run(repository: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output; all processes of it must have ended."""
    command = [sys.executable, "-m", "benchmarks.transfer", *arguments]
    process = subprocess.Popen(
        command,
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=90)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def test_rows_of_every_connector(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    status, output = run(
        repository,
        f"--connectors={','.join(KINDS)}",
        "--sizes=1,2",
        f"--block-bytes={BLOCK_BYTES},{4 * MIB}",
        "--spacing-ms=2",
        "--checksums=1",
        "--within-s=80",
        f"--json={file}",
    )
    assert status == 0, output
    figures = json.loads(file.read_text())
    assert [pool["pool_bytes"] for pool in figures["machine"]["pools"]] == [4 * MIB] * 2
    # Blocks that are larger than the transfers are left out, and the run goes on.
    assert {(row["connector"], row["block_bytes"]) for row in figures["rows"]} == {
        (kind, BLOCK_BYTES) for kind in KINDS
    }
    assert all("left out" in missing["reason"] for missing in figures["missing"]), figures[
        "missing"
    ]
    for kind in KINDS:
        rows: list[dict[str, Any]] = [row for row in figures["rows"] if row["connector"] == kind]
        assert [(row["name"], row["num_bytes"]) for row in rows] == [
            ("one", MIB),
            ("one", 2 * MIB),
            ("one, not watched before", 2 * MIB),
            ("8 at once", 2 * MIB),
            ("grows in 4 chunks", 2 * MIB),
            ("one, 1 checked", MIB),
            ("one, 1 checked", 2 * MIB),
        ]
        for row in rows:
            assert row["verified_bytes"] == row["num_bytes"]
            assert len(row["times_s"]) == len(row["checked_blocks"]) >= row["counted"] >= 7
            blocks = row["num_bytes"] // BLOCK_BYTES
            assert set(row["checked_blocks"]) == {blocks if row["checksums"] else 0}
            assert 0 < row["p10_s"] <= row["exposed_s"] <= row["p90_s"]
            # Several together: the last one's own time is shorter than that of all.
            assert row["in_hand_s"] > 0
            assert (row["gb_s"] is None) == (row["chunks"] > 1)
    assert list(figures["best"]) == [str(MIB), str(2 * MIB)]
    assert output.splitlines()[-1].startswith("best: 1 MiB ")


def test_a_row_with_checksums_has_the_figures_of_transfers_of_which_a_block_was_checked() -> None:
    """Of 32 blocks with 0.01 three in four have none."""
    work = Work("one, 0.01 checked", MIB, checksums=0.01)
    row = Row("direct", BLOCK_BYTES, work, MIB, MIB, 0.0)
    row.took.extend(
        [Took(0.1, 0.1, 0.0), Took(0.3, 0.4, 0.0, 1), Took(0.1, 0.1, 0.0), Took(0.5, 0.6, 0.0, 2)]
    )
    built = row.built()
    assert (built["exposed_s"], built["in_hand_s"], built["counted"]) == (0.4, 0.5, 2)
    assert built["checked_blocks"] == [0, 1, 0, 2]
    assert "one, 0.01 checked, in 2 of 4 " in str(row)


def test_a_device_that_is_not_there_gives_a_line_for_each_connector(repository: Path) -> None:
    status, output = run(
        repository, "--connectors=direct,nixl", "--devices=cpu,cuda:99", "--sizes=1"
    )
    assert status == 1
    lines = output.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["direct", "nixl", "best"], output
    assert lines[-1] == "best: nothing was measured"


def test_wrong_bytes_are_seen() -> None:
    end = End("source", "cpu", 4 * BLOCK_BYTES, BLOCK_BYTES)
    try:
        assert end.open("direct", BLOCK_BYTES) == 4
        assert end.verify([1, 3], [1, 3]) == 2 * BLOCK_BYTES
        end.poison([3])
        with pytest.raises(
            TransferError, match=r"1 of 2 blocks have other bytes.* block 3 here, 3 there"
        ):
            end.verify([1, 3], [1, 3])
    finally:
        end.close()
