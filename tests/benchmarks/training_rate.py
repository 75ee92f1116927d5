"""Trained tokens a second of the compiled step, beside its floor and speculators 0.4.0.1, in one run.

    python tests/benchmarks/training_rate.py --parts rate --seconds 280 --out rate.jsonl     # one GPU
    torchrun --nproc-per-node 2 tests/benchmarks/training_rate.py --parts ddp --out ddp.jsonl       # several
    python tests/benchmarks/training_rate.py --size tiny --device cpu --parts rate                   # a self-check

Every figure is printed as one line of JSON as soon as it is known, a part that fails is a line with its
error, and the parts stop when the seconds are used up. Documents are 512 rows long, as in the measurements
of the peers that NOTES.md names. A step that leaves its one compiled graph is an error here.
"""

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import training_disk  # noqa: E402
import training_floor  # noqa: E402
from training_ours import REAL, STEPS, TINY, Ours, config_of, documents_of  # noqa: E402
from training_speculators import Speculators  # noqa: E402

from jobs.draft.arithmetic import flop_of_a_token  # noqa: E402
from jobs.draft.ranks import Ranks, joined  # noqa: E402

SAMPLE = 502  # rows of the 503-token samples of the run to beat
GIB = 2**30


class Bench:
    """Options, the clock, and where lines go."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.began = options, time.monotonic()
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.config = config_of(REAL if options.size == "real" else TINY)
        self.folder = Path(tempfile.mkdtemp(prefix="training-rate-"))
        self.matmul: float | None = None
        self.known: dict[tuple[str, int], float] = {}  # (who, rows) -> tokens a second

    @property
    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.began)

    def say(self, what: str, **figures) -> None:
        line = json.dumps({"what": what, "at": round(time.monotonic() - self.began, 1), **{k: _short(v) for k, v in figures.items()}})
        print(line, flush=True)
        if self.options.out:
            with open(self.options.out, "a") as file:
                file.write(line + "\n")

    def attempt(self, name: str, needs: float, part: Callable[..., None], *arguments, **changes) -> None:
        """One part: skipped where the time is short, and a failure is a line, not the end."""
        if self.left < needs:
            return self.say(name, skipped=f"{self.left:.0f} s left, {needs:.0f} needed")
        try:
            part(*arguments, **changes)
        except Exception as error:  # noqa: BLE001 - the next part may well work
            self.say(name, error=f"{type(error).__name__}: {error}"[:400])
            traceback.print_exc()
        self.clean()

    def clean(self) -> None:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _short(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ------------------------------------------------------------------ one GPU


def ours(bench: Bench, rows: int, extra: bool, name: str = "ours", **changes) -> None:
    """Our step at one size, with `changes` in its settings; extra: also samples of 503 tokens, and an epoch that has rows to decide."""
    began = time.perf_counter()
    made = Ours(bench.config, rows, Ranks(0, 1, bench.device), bench.folder, **changes)
    if name == "ours.kept_by_default":  # PyTorch's own choice of what the backward pass finds ready
        torch._functorch.config.ban_recompute_materialized_backward = True
    feed = made.feed(documents_of(rows, 512))
    made.first_steps(feed)
    first = time.perf_counter() - began
    seconds = _steady(bench, made, feed)
    _tell(bench, name, rows, rows, seconds, compile_and_first_step_seconds=first)
    bench.known[name, rows] = rows / seconds
    if bench.cuda and extra:
        bench.say("ours.host_syncs", rows=rows, found=_host_syncs(made, feed))
    if extra:
        feed = made.feed(documents_of(rows // SAMPLE * SAMPLE, SAMPLE))
        used = rows // SAMPLE * SAMPLE
        _tell(bench, "ours.packed_503_token_samples", rows, used, _steady(bench, made, feed), padding=1 - used / rows)
        bench.known["packed", rows] = used / made.steps(feed, 3)[0]
        _tell(
            bench,
            "ours.first_epoch_a_quarter_undecided",
            rows,
            rows,
            _steady(bench, made, made.feed(documents_of(rows, 512), undecided=0.25)),
        )
        _tell(bench, "ours.one_document", rows, rows, _steady(bench, made, made.feed((rows,))))


def _steady(bench: Bench, made: Ours, feed) -> float:
    """Seconds a step over about three seconds, and the peak of the memory during them."""
    once, _ = made.steps(feed, 2)
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    return made.steps(feed, max(4, min(40, int(bench.options.measure / once))))[0]


def _tell(bench: Bench, who: str, rows: int, used: int, seconds: float, **more) -> None:
    figures = {"rows": rows, "tokens_per_second": used / seconds, "step_ms": 1e3 * seconds}
    if bench.cuda:
        figures |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "reserved_gib": torch.cuda.max_memory_reserved() / GIB}
        figures["recipe_tflops"] = used * flop_of_a_token(bench.config, STEPS) / seconds / 1e12
        if bench.matmul:
            figures["of_matmul_rate"] = figures["recipe_tflops"] / bench.matmul
    bench.say(who, **figures, **more)


def _host_syncs(made: Ours, feed) -> str:
    """What makes the host wait for the device inside a step, by PyTorch's own detector."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        from training_ours import Window

        made.run.optimizer_step(feed, Window(STEPS, 1.0, made.device))
        return "none"
    except RuntimeError as error:
        return "".join(traceback.format_exception(error))[-700:]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        made.run.step += 1


def floor(bench: Bench, rows: int) -> None:
    bench.say("floor", rows=rows, **training_floor.measure(bench.config, rows, STEPS, once=False))
    bench.say("floor.embedding_projected_once", rows=rows, **training_floor.measure(bench.config, rows, STEPS, once=True, seconds=1.0))


def peer(bench: Bench, sizes: list[tuple[int, tuple[int, ...], str]]) -> None:
    """speculators at these (rows, documents, name), each compiled anew so that its shape is static."""
    made = Speculators(bench.config, bench.device, max(rows for rows, _, _ in sizes))
    for rows, lengths, name in sizes:
        if bench.left < 35:
            bench.say(name, rows=rows, skipped=f"{bench.left:.0f} s left")
            continue
        try:
            torch._dynamo.reset()
            began = time.perf_counter()
            seconds = made.measure(rows, lengths, bench.options.measure)
            _tell(bench, name, rows, sum(lengths), seconds, with_compilation_seconds=time.perf_counter() - began)
            bench.known[name, rows] = sum(lengths) / seconds
        except Exception as error:  # noqa: BLE001
            bench.say(name, rows=rows, error=f"{type(error).__name__}: {error}"[:400])
        torch.cuda.empty_cache()


def ratios(bench: Bench) -> None:
    known = bench.known
    for rows in sorted({rows for who, rows in known if who == "speculators"}):
        if ("ours", rows) in known:
            bench.say("ratio.ours_over_speculators", rows=rows, ratio=known["ours", rows] / known["speculators", rows])
    single, packed = known.get(("speculators.one_503_token_sample", 512)), [v for (who, _), v in known.items() if who == "packed"]
    if single and packed:
        bench.say("ratio.packed_over_one_sample_a_step", ratio=max(packed) / single)


def one_gpu(bench: Bench) -> None:
    if not bench.cuda:
        return bench.attempt("ours", 0, ours, bench, 1024, True)
    device = torch.cuda.get_device_properties(0)
    bench.say(
        "machine",
        gpu=device.name,
        memory_gib=device.total_memory / GIB,
        torch=torch.__version__,
        flop_of_a_token=flop_of_a_token(bench.config, STEPS),
    )
    bench.matmul = training_floor.matmul_rate()
    bench.say("matmul_8192", tflops=bench.matmul)
    first, second, *more = bench.options.rows
    bench.attempt("ours", 60, ours, bench, first, True)
    bench.attempt("floor", 15, floor, bench, first)
    bench.attempt("ours", 50, ours, bench, second, False)
    bench.attempt("ours.fp8", 60, ours, bench, first, False, "ours.fp8", fp8=True)
    one = (512, (SAMPLE,), "speculators.one_503_token_sample")
    size = lambda rows: (rows, documents_of(rows, 512), "speculators")  # noqa: E731
    bench.attempt("speculators", 60, peer, bench, [size(second), one, size(first)])
    ratios(bench)
    bench.attempt("floor", 12, floor, bench, second)
    for rows in more:
        bench.attempt("ours", 45, ours, bench, rows, False)
    bench.attempt("ours.kept_by_default", 45, ours, bench, first, False, "ours.kept_by_default")
    ratios(bench)


def forms(bench: Bench) -> None:
    """What finer and coarser arithmetic costs: the step in bf16, with every product in TF32, and in FP8."""
    for name, changes in {"ours": {}, "ours.tf32": {"precision": "tf32"}, "ours.fp8": {"fp8": True}}.items():
        bench.attempt(name, 50, ours, bench, bench.options.rows[0], False, name, **changes)


def from_disk(bench: Bench) -> None:
    """Stores of `--samples` samples in bf16 and in FP8, written beside the compilation, for each two epochs: from the disk, from the page cache.

    speculators reads one `.pt` a sample, of twice as many samples: at 4,096 tokens a step, and one sample a step as the run to beat.
    """
    rows, samples, stores = bench.options.rows[0], bench.options.samples, ("bfloat16", "float8_e4m3fn")
    writing = [
        threading.Thread(target=training_disk.write_store, args=(bench.folder / dtype, bench.config, samples, dtype)) for dtype in stores
    ]
    if bench.cuda:
        writing.append(threading.Thread(target=training_disk.write_files, args=(bench.folder / "files", bench.config, 2 * samples)))
    for thread in writing:
        thread.start()
    made = Ours(bench.config, rows, Ranks(0, 1, bench.device), bench.folder)
    made.first_steps(made.feed(documents_of(rows, 512)), 3)
    for thread in writing:
        thread.join()
    training_disk.forget(bench.folder)  # nothing may still be on its way to the disk that is measured
    for dtype in stores:
        for figures in training_disk.ours(made, bench.folder / dtype, epochs=2):
            bench.say(f"disk.ours.{dtype}", rows=rows, **figures)
            bench.known[f"disk.ours.{dtype}.{figures['epoch']}", rows] = figures["tokens_per_second"]
    del made
    bench.clean()
    if not bench.cuda:
        return
    theirs = Speculators(bench.config, bench.device, 4096)
    for size in (4096, 512):  # the second has room for one sample
        if bench.left < 45:
            bench.say("disk.speculators", rows=size, skipped=f"{bench.left:.0f} s left")
            continue
        torch._dynamo.reset()
        for figures in training_disk.theirs(theirs, bench.folder / "files", size, workers=8):
            bench.say("disk.speculators", **figures)
            ratio = {who: rate / figures["tokens_per_second"] for (who, _), rate in bench.known.items() if who.startswith("disk.ours")}
            bench.say("ratio.from_disk_over_speculators", rows=size, **ratio)


# ------------------------------------------------------------------ several GPUs


def several(bench: Bench) -> None:
    """The same global batch on one rank and on all, then as many rows a rank as one had: speed."""
    rows = bench.options.rows[0]
    with joined(bench.options.device, 1_000_000) as ranks:
        bench.device = ranks.device
        lengths, say = documents_of(rows, 512), bench.say if ranks.first else lambda *_, **__: None
        if bench.cuda:
            say("all_reduce", **_exchange_rate(bench, ranks))
        alone_losses, alone = [], None
        if ranks.first:
            made = Ours(bench.config, rows, Ranks(0, 1, ranks.device), bench.folder, accumulate=ranks.world)
            alone_losses = made.first_steps(made.feed(lengths, 2 * ranks.world), 6)
            made.accumulate = made.run.plan.accumulate = 1
            made.run.settings = made.run.settings.model_copy(update={"accumulate": 1})
            alone = _steady(bench, made, made.feed(lengths))
            say("ddp.one", rows=rows, tokens_per_second=rows / alone, step_ms=1e3 * alone)
            del made
            bench.clean()
        ranks.barrier()
        made = Ours(bench.config, rows, ranks, bench.folder, accumulate=ranks.world)
        losses = made.first_steps(made.feed(lengths, 2 * ranks.world), 6)
        if alone_losses:
            apart = max(abs(a - b) / abs(a) for a, b in zip(alone_losses, losses, strict=True))
            say(
                "ddp.loss_at_the_same_global_batch",
                one=[_short(x) for x in alone_losses],
                all=[_short(x) for x in losses],
                largest_relative_difference=apart,
            )
        feed = made.feed(lengths, 2 * ranks.world)
        together, _ = made.steps(feed, 8)
        together, _ = made.steps(feed, 8)
        if alone:
            _tell(bench, "ddp.all", rows, rows * ranks.world, together, ranks=ranks.world, efficiency=alone / together)
        ranks.barrier()


def _exchange_rate(bench: Bench, ranks: Ranks) -> dict[str, float]:
    """Milliseconds that the gradients of one step take from rank to rank, in fp32 and in bf16: summed everywhere, and in the
    two halves of which a step consists, gradients reduced and scattered, weights gathered."""
    figures = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        numbers = 1_190_000_000 if bench.options.size == "real" else 1_000_000
        gradients = torch.ones(numbers // ranks.world * ranks.world, dtype=dtype, device=ranks.device)
        share = gradients.chunk(ranks.world)[ranks.rank]
        ways = {
            "": lambda g=gradients: ranks.sum(g),
            "reduce_scatter_": lambda g=gradients, s=share: torch.distributed.reduce_scatter_tensor(s, g),
            "all_gather_": lambda g=gradients, s=share: torch.distributed.all_gather_into_tensor(g, s),
        }
        for way, exchange in ways.items():
            for number in range(6):
                if number == 2:
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                exchange()
            torch.cuda.synchronize()
            figures[f"{name}_{way}ms"] = 1e3 * (time.perf_counter() - began) / 4
        figures[f"{name}_gb"] = gradients.nbytes / 1e9
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="rate", help="rate, forms and disk (one GPU), ddp (under torchrun)")
    parser.add_argument(
        "--rows", type=lambda text: [int(x) for x in text.split(",")], default=[8192, 4096, 512, 32768, 16384], help="tokens a step"
    )
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=280, help="no part begins that would not end in these")
    parser.add_argument("--measure", type=float, default=3.0, help="seconds of each measurement")
    parser.add_argument("--samples", type=int, default=192, help="samples of 503 tokens on the disk; 192 are 5.5 GB")
    parser.add_argument("--out", help="append the lines here too")
    bench = Bench(parser.parse_args())
    for part in bench.options.parts.split(","):
        bench.attempt(part, 0, {"rate": one_gpu, "forms": forms, "disk": from_disk, "ddp": several}[part], bench)
    bench.say("end")


if __name__ == "__main__":
    main()
