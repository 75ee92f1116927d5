"""Opening an existing store for writing: its layout must be ours, and every committed sample must have its rows."""

import dataclasses
from pathlib import Path

from jobs.errors import MustFix
from jobs.storage.extents import INDEX, Extent, first_gap, read_index, resolve
from jobs.storage.responses import RESPONSES, scan_responses
from jobs.storage.shards import STORE, StateLayout


def settle_layout(folder: Path, layout: StateLayout, *, clean: bool = True) -> None:
    """Write the layout into a new store; another one than an existing store has is a MustFix.

    clean: half-made shards are of an earlier run; another writer of a group may be making one.
    """
    for leftover in folder.glob("shard-*.safetensors.partial") if clean else ():
        leftover.unlink()
    if not (folder / STORE).exists():
        if (folder / INDEX).exists():
            raise MustFix("The store's description is missing", where=str(folder), remedy=f"restore {STORE}")
        layout.save(folder)
        return
    there = StateLayout.load(folder)
    ours, theirs = dataclasses.asdict(layout), dataclasses.asdict(there)
    differing = [f"{key} {theirs[key]!r} instead of {ours[key]!r}" for key in ours if ours[key] != theirs[key]]
    if differing:
        raise MustFix(
            f"The store was written with {', '.join(differing)}",
            where=str(folder),
            remedy="use the settings it was written with, or another run directory",
        )


def committed_extents(folder: Path) -> tuple[dict[str, int], list[Extent]]:
    """(rows of each committed sample, the extents committed samples consist of)."""
    committed = {response.id: response.rows for _, _, response in scan_responses(folder / RESPONSES)}
    extents: dict[str, list[Extent]] = {sample_id: [] for sample_id in committed}
    for extent in read_index(folder / INDEX):
        if extent.sample in extents:
            extents[extent.sample].append(extent)
    live: list[Extent] = []
    for sample_id, rows in committed.items():
        gap = first_gap(extents[sample_id], rows)
        if gap is not None:
            raise MustFix(
                f"Sample {sample_id} is committed, but has no hidden state at position {gap} of {rows}",
                where=str(folder),
                remedy="restore the store from a copy, or generate the split again in an empty folder",
            )
        live += [extent for extent, _, _ in resolve(extents[sample_id], rows)]
    return committed, live
