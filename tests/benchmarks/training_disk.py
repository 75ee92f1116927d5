"""From files on a local disk to trained tokens: our store, and speculators' one `.pt` a sample."""

import os
import time
from pathlib import Path

import torch
from training_ours import STEPS, TAPS, Ours

from jobs.draft.coverage import Coverage
from jobs.draft.data import ReadAhead
from jobs.draft.model import HeadConfig
from jobs.draft.packing import Plan, cut
from jobs.draft.progress import Window
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter

TOKENS = 503
MEASURED_SECONDS = 15.0


def states(config: HeadConfig, seed: int):
    """ids [n], taps [n-1, 3, H], final [n-1, H], logprob [n-1]; a quarter of the rows below a half."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (TOKENS,), generator=g)
    both = torch.randn(8, 4, config.hidden_size, generator=g).bfloat16().repeat(-(-TOKENS // 8), 1, 1)[: TOKENS - 1]
    logprob = torch.where(torch.rand(TOKENS - 1, generator=g) < 0.25, -2.0, -0.1)
    return ids, both[:, :3], both[:, 3], logprob


def write_store(folder: Path, config: HeadConfig, samples: int, dtype: str = "bfloat16") -> None:
    with ResponseLog(folder) as log:
        writer = StateWriter(folder, StateLayout(TAPS, config.hidden_size, dtype, "synthetic", "0" * 40, "0" * 64))
        for number in range(samples):
            ids, taps, final, logprob = states(config, number)
            name = f"s{number:05d}#0"
            writer.append(name, 0, taps, final, logprob)
            writer.finish(name, TOKENS)
            writer.sync()
            log.append(Response(name, ids[:1].tolist(), ids[1:].tolist(), "length", {}, "synthetic", False))
        writer.close()


def write_files(folder: Path, config: HeadConfig, samples: int) -> None:
    folder.mkdir(parents=True)
    for number in range(samples):
        ids, taps, final, _ = states(config, number)
        layers = [torch.cat((x, x[-1:])).clone() for x in (*taps.unbind(1), final)]
        torch.save(
            {"input_ids": ids, "loss_mask": torch.ones(TOKENS, dtype=torch.long), "hidden_states": layers}, folder / f"data_{number}.pt"
        )


def forget(folder: Path) -> None:
    """Takes the files out of the page cache, written to the disk first."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ours(made: Ours, folder: Path, epochs: int) -> list[dict[str, float]]:
    """For each epoch: tokens a second, share of the time waiting for data, bytes a second; the first one from the disk."""
    store = StateStore(folder)
    run = made.run
    pieces = cut([(i, 1, rows + 1) for i, rows in store.lengths().items()], made.rows)
    plan = Plan(pieces, rows=made.rows, accumulate=1, epochs=epochs, max_steps=None, seed=0)
    run.coverage = Coverage(store.lengths(), run.head.t2d.cpu()) if run.coverage else None
    of_an_epoch = len(plan.epoch(0))
    with ReadAhead(store, plan.share(0, 0, 1), made.rows, TAPS, made.device, run.coverage, run.compiled) as ahead:
        made.first_steps(ahead)  # FP8 states are another graph: compiled before the clock starts, and no further one after
    run.coverage = Coverage(store.lengths(), run.head.t2d.cpu()) if run.coverage else None
    forget(folder)
    told = []
    with ReadAhead(store, plan.share(0, 0, 1), made.rows, TAPS, made.device, run.coverage, run.compiled) as ahead:
        for number in range(epochs):
            began, waited, read, used = (
                time.perf_counter(),
                ahead.waited,
                ahead.bytes,
                sum(p.rows for row in plan.epoch(number) for p in row),
            )
            window = Window(STEPS, 1.0, made.device)
            for _ in range(of_an_epoch):
                facts = run.optimizer_step(ahead, window)
                run._settle()
                run.pending, run.step = facts, run.step + 1
            run._settle()
            seconds = time.perf_counter() - began
            told.append({
                "epoch": number, "steps": of_an_epoch, "tokens_per_second": used / seconds, "data_wait": (ahead.waited - waited) / seconds,
                "gb_per_second": (ahead.bytes - read) / seconds / 1e9, "bytes_a_token": (ahead.bytes - read) / used,
            })  # fmt: skip
    return told


def theirs(made, folder: Path, rows: int, workers: int) -> list[dict[str, float]]:
    """One epoch of speculators' dataset, collation and step at `rows` a step; not counted are the first steps, with what was read ahead while they compiled.

    Broken off after MEASURED_SECONDS of counted steps.
    """
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from torch.utils.data import DataLoader

    data = Eagle3SampleFileDataset(max_len=rows, datapath=str(folder), hidden_states_dtype=torch.bfloat16)
    batches = DataLoader(
        data, batch_size=rows // TOKENS, num_workers=workers, pin_memory=True, drop_last=True, collate_fn=create_collate_fn(rows)
    )
    forget(folder)
    used, began, number, first = 0, 0.0, 0, 2 * workers + 4  # a worker has two batches ready
    for number, batch in enumerate(batches):
        if number == first:
            torch.cuda.synchronize()
            began, used = time.perf_counter(), 0
        made.step({name: value.to(made.device, non_blocking=True) for name, value in batch.items()}).item()
        used += int(batch["lengths"].sum())
        if began and time.perf_counter() - began > MEASURED_SECONDS:
            break
    del batches  # its workers, before the next ones are started
    return [{"rows": rows, "steps": number + 1 - first, "tokens_per_second": used / (time.perf_counter() - began)}]
