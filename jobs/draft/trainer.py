"""Training of the draft head: one loop for a laptop's CPU and for the GPUs of several machines.

Decisions:
* The result depends on settings, seed and sample ids, not on the number of processes: packed rows
  go round-robin to the ranks, losses are SUMMED in the backward pass, and gradients divided by the
  global number of loss positions afterwards, together with the clipping, in one pass. Each rank
  updates its share of the weights (`jobs.draft.shares`).
* Weights, gradients, moments and norms are fp32; matmuls are bf16 on CUDA (autocast; see `train.precision`), fp32 on CPU.
* Nothing waits for the GPU: clipping and the decision to leave a step out happen on the device
  (`jobs.draft.update`), and the host hears of a step while the next one runs.
* The learning rate is a function of the step, and training draws no random numbers outside the plan,
  so a checkpoint is weights, moments, step and counters. On CPU the number of threads is saved too:
  it decides the order of sums, and "bit-identical after a kill" includes a kill that moves the run.
* The first process reads and writes checkpoints, the others get theirs from it: only it needs the folder.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from jobs.draft import best, checkpoint, float8, snapshot
from jobs.draft.arithmetic import flop_of_a_token, matmul_rate, products
from jobs.draft.attention import Documents
from jobs.draft.coverage import Coverage
from jobs.draft.data import PackedRow, ReadAhead
from jobs.draft.evidence import Found
from jobs.draft.loss import TargetHead, Unroll, compiled, step_weights
from jobs.draft.model import Eagle3Head, VerifierWeights
from jobs.draft.packing import Plan
from jobs.draft.progress import Reporter, Window
from jobs.draft.ranks import HostCopy, Ranks, StepSums, joined, out_of_memory_named, threads
from jobs.draft.team import together
from jobs.draft.update import REASONS, SPIKE, Update, learning_rate
from jobs.draft.work import TrainResult, Work, prepared
from jobs.errors import Interrupted, MustFix
from jobs.settings import TrainSettings
from jobs.storage.states import StateStore
from jobs.wording import counted


@dataclass(frozen=True)
class StepFacts:
    """An optimizer step whose outcome is still on its way from the device."""

    step: int
    outcome: HostCopy  # fp64: loss sum, loss positions, gradient norm, reason to leave it out, usual loss, ranks asked to stop


def train(
    *,
    settings: TrainSettings,
    seed: int,
    head: Eagle3Head,
    verifier: VerifierWeights,
    store: StateStore,
    sample_ids: Sequence[str],
    folder: Path,
    warm: bool,
    evaluate: Callable[[Eagle3Head], dict] | None,
    should_stop: Callable[[], bool],
    report: Callable[[dict], None],
) -> TrainResult:
    """Trains `head` in place, from the newest whole checkpoint of `folder` if there is one.

    warm: the head was trained before; picks the learning rate. evaluate: called with the head every
    `evaluate_every` steps and at the end; its figures go out as `{"step", "evaluation"}`; it may raise
    Interrupted, and is asked again when training continues. should_stop: asked before each optimizer
    step; when true, everything is saved and Interrupted raised. report: gets a line (see
    `jobs.draft.progress`) every `log_every` steps, and `{"note": text}`. After a kill, lines of steps
    since the last checkpoint are reported again.

    MustFix: states, head and verifier that do not belong together; no token to train on; more ranks
    than packed rows a step or in all; a changed setting on resume; too many steps that are not finite.
    """
    verifier.check(head.config.vocab_size, head.config.hidden_size)
    folder.mkdir(parents=True, exist_ok=True)
    work = Work(
        settings, seed, head.config, tuple(head.draft_ids.tolist()), verifier.embedding.dtype, verifier.lm_head.dtype, store.folder,
        tuple(sample_ids), folder, warm, evaluate is not None,
    )  # fmt: skip
    plan = prepared(work, store)
    with together(settings, folder), joined(settings.device, settings.accumulate) as ranks:
        ranks.of_first(lambda: work)
        ranks.refuse_together(None)
        return train_on(ranks, work, plan, head, verifier, store, evaluate, should_stop, report)


def train_on(
    ranks: Ranks, work: Work, plan: Plan, head: Eagle3Head, verifier: VerifierWeights, store: StateStore,
    evaluate: Callable[[Eagle3Head], dict] | None, should_stop: Callable[[], bool], report: Callable[[dict], None],
) -> TrainResult:  # fmt: skip
    """One rank's part of a training, after the ranks have found each other (`train`, `team.train_along`)."""
    settings, folder = work.settings, work.folder
    plan.refuse_idle(ranks.world)
    reporter = Reporter(report, folder / "tensorboard" if ranks.first else None)
    if ranks.first:
        checkpoint.clean(folder, reporter.note)
    saved = ranks.of_first(lambda: checkpoint.newest(folder, reporter.note))
    with out_of_memory_named(), threads(ranks, saved.state["threads"] if saved else None), products(settings.precision):
        run = _Run(settings, work.seed, head, verifier, store, plan, folder, work.warm, ranks, reporter)
        try:
            if saved:
                run.restore(saved)
            run.loop(evaluate, should_stop)
            run.take_best()
        finally:
            run.writer.close()
            reporter.close()
    return run.result(saved)


class _Run:
    """One training on one rank: the pieces that the loop joins."""

    def __init__(
        self, settings: TrainSettings, seed: int, head: Eagle3Head, verifier: VerifierWeights, store: StateStore,
        plan: Plan, folder: Path, warm: bool, ranks: Ranks, reporter: Reporter,
    ):  # fmt: skip
        self.settings, self.seed, self.store, self.plan = settings, seed, store, plan
        self.folder, self.warm, self.ranks, self.reporter = folder, warm, ranks, reporter
        self.head = head.to(ranks.device).train()
        if settings.fp8:
            float8.check(ranks.device)
            self.head.train_in_fp8()
        for parameter in head.parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
        self.trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
        self.cuda = ranks.device.type == "cuda"
        self.compiled = self.cuda and settings.compile
        self.narrow = self.cuda and settings.precision == "bf16"
        dtype = torch.bfloat16 if self.narrow else torch.float32
        targets = TargetHead(verifier.lm_head, head.draft_ids.cpu(), dtype).to(ranks.device)
        unroll = Unroll(head, targets, settings.loss, every_row=self.compiled)
        self.unroll = compiled(unroll) if self.compiled else unroll
        frozen = (self.head.embed_tokens.weight, targets.sliced, *([] if targets.others is None else [targets.others]))
        ranks.agree(tensor.data for tensor in (*self.trained.values(), *frozen))
        self.targets = targets
        self.coverage = None
        if settings.loss == "forward_kl" and targets.others is not None:
            self.coverage = Coverage(store.lengths(sorted({p.sample_id for p in plan.cut.pieces})), head.t2d.cpu())
        self.update = Update(self.trained, settings, ranks)
        self.writer = checkpoint.CheckpointWriter(folder, settings.keep_checkpoints)
        self.step = self.tokens = self.bad_steps = 0
        self.judged = 0  # the step of the last evaluation
        self.last_loss: float | None = None
        self.pending: StepFacts | None = None
        self.stopping = self.finished = False
        self.best = best.Best()
        self.grad_norm = math.nan  # of the last step the host has heard of
        self.stood = 0.0  # seconds that training stood still for checkpoints
        self.flops: float | None = None  # of this device, measured when the loop begins
        self.began = time.perf_counter()
        self.first_step = 0.0  # seconds until its outcome was known

    # ------------------------------------------------------------------ the loop

    def loop(self, evaluate: Callable[[Eagle3Head], dict] | None, should_stop: Callable[[], bool]) -> None:
        settings, plan, ranks = self.settings, self.plan, self.ranks
        share = plan.share(self.step, ranks.rank, ranks.world)
        self.flops = matmul_rate(ranks.device)
        window = self._window()
        if evaluate and self._is_to_be_judged():
            self._evaluate(evaluate)  # what a stop broke off
        with ReadAhead(self.store, share, plan.rows, self.head.config.taps, ranks.device, self.coverage, self.compiled) as ahead:
            while self.step < plan.steps and not self.finished:
                asked = should_stop()
                # Of several ranks all must stop at one step: they hear of each other with a step's outcome.
                if self.stopping or (asked and ranks.world == 1):
                    self._stop()
                facts = self.optimizer_step(ahead, window, asked)
                self._settle()
                self.pending = facts
                self.step += 1
                last = self.step == plan.steps
                if self.step % settings.log_every == 0 or last:
                    self._log(window)
                    window = self._window()
                if evaluate and self._is_to_be_judged():
                    self._evaluate(evaluate)
                    window = self._window()
                # After the evaluation: a run that continues from here must know what it found.
                if self.step % settings.checkpoint_every == 0 or last or self.finished:
                    window.stood += self.save()
        self.writer.wait()

    def optimizer_step(self, ahead: ReadAhead, window: Window, asked_to_stop: bool = False) -> StepFacts:
        """Forward and backward over this rank's packed rows, then one update; nothing here waits for the device."""
        settings = self.settings
        short = self.step < settings.single_step_share * self.plan.steps
        ttt_steps = 1 if short else settings.ttt_steps
        decay = step_weights(settings.ttt_decay, ttt_steps, self.ranks.device)  # [K]
        micro_rows = -(-settings.accumulate // self.ranks.world)
        waited, read = ahead.waited, ahead.bytes
        of_all = StepSums(self.ranks, ttt_steps)
        for _ in range(micro_rows):
            row, documents = ahead.next()
            of_all.sums += self._backward(row, documents, ttt_steps, decay)
        of_all.exchange(asked_to_stop, ahead.waited - waited, ahead.bytes - read)
        loss, count = (decay.double() * of_all.sums[0]).sum(), (decay.double() * of_all.sums[1]).sum()
        rate = learning_rate(self.step, self.plan.steps, settings, self.warm)
        norm, reason = self.update.step(loss, count, rate)
        used = sum(piece.rows for packed in self.plan.step_rows(self.step) for piece in packed)
        self.tokens += used
        rows = self.plan.rows * len(self.plan.step_rows(self.step))
        flop = used * flop_of_a_token(self.head.config, ttt_steps)
        window.add(of_all.sums.where(reason == 0, 0.0), used, rows, flop, of_all.disk)
        outcome = torch.stack((loss, count, norm, reason, self.update.usual, of_all.asked[0]))
        return StepFacts(self.step, HostCopy(outcome))

    def _backward(self, row: PackedRow, documents: Documents, ttt_steps: int, decay: Tensor) -> Tensor:
        """One packed row; returns its sums `[4, K]`, without gradient."""
        if row.undecided is not None:
            if len(row.undecided):
                final = row.final_of(row.undecided.rows.to(self.ranks.device, non_blocking=True))
                row = replace(row, covered=self.coverage.decide(row.undecided, row.covered, final, self.targets))
            row = replace(row, undecided=None)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.narrow):
            unrolled = self.unroll(row, documents, ttt_steps)
        (unrolled.loss * decay).sum().backward()
        return torch.stack([column.detach() for column in unrolled]).double()

    def _settle(self) -> None:
        """Takes note of the outcome of the step before, which the device has by now."""
        facts, self.pending = self.pending, None
        if facts is None:
            return
        loss, count, norm, reason, usual, stopping = facts.outcome.get().tolist()
        self.first_step = self.first_step or time.perf_counter() - self.began
        self.grad_norm = norm
        self.stopping = self.stopping or stopping > 0
        if reason:
            self._bad_step(facts, loss / count if count else loss, norm, int(reason), usual)

    # ------------------------------------------------------------------ what is written down

    def _bad_step(self, facts: StepFacts, loss: float, norm: float, reason: int, usual: float) -> None:
        """Counts a step that was left out and keeps the evidence; too many are MustFix."""
        self.bad_steps += 1
        found = Found(facts.step, REASONS[reason], loss, usual, norm, learning_rate(facts.step, self.plan.steps, self.settings, self.warm))
        place = self.folder / found.name
        if self.ranks.first:
            samples = [piece.sample_id for packed in self.plan.step_rows(facts.step) for piece in packed]  # of all ranks
            found.keep(place, self.bad_steps, self.store, self.head.config.taps, samples, self.trained)
            usually = f" where {usual:.3g} is usual" if reason == SPIKE else ""
            self.reporter.note(f"step {facts.step} is skipped: loss {loss}{usually}, gradient norm {norm}; evidence in {place.name}")
        if self.bad_steps > self.settings.bad_step_limit:
            raise MustFix(
                f"{self.bad_steps} optimizer steps had {REASONS[reason]}",
                where=str(place),
                remedy="see whether states or weights are bad there; else lower train.learning_rate",
            )

    def _window(self) -> Window:
        return Window(self.settings.ttt_steps, self.settings.ttt_decay, self.ranks.device)

    def _log(self, window: Window) -> None:
        self._settle()
        figures = window.line(self.ranks.world, self.flops)
        self.last_loss = figures["loss"]
        if self.step > 2 * self.settings.log_every:
            self.reporter.name_a_slow_disk(figures)
        rate, cursor = figures.pop("steps_per_second"), self.plan.cursor(self.step)
        self.reporter.line({
            "step": self.step, "steps": self.plan.steps, "epoch": cursor.epoch, **figures,
            "learning_rate": learning_rate(self.step - 1, self.plan.steps, self.settings, self.warm),
            "grad_norm": self.grad_norm if math.isfinite(self.grad_norm) else None,
            "eta_seconds": (self.plan.steps - self.step) / rate if rate else None,
            "trained_tokens": self.tokens, "bad_steps": self.bad_steps,
        })  # fmt: skip

    def _is_to_be_judged(self) -> bool:
        every = self.settings.evaluate_every
        return self.judged < self.step and (self.step == self.plan.steps or bool(every and self.step % every == 0))

    def _evaluate(self, evaluate: Callable[[Eagle3Head], dict]) -> None:
        """The first rank judges, the others wait for its word on whether training goes on."""
        self._settle()
        finished = self.ranks.of_first(lambda: self._judge(evaluate))
        if finished is None:
            self._stop()
        self.finished, self.judged = finished, self.step

    def _judge(self, evaluate: Callable[[Eagle3Head], dict]) -> bool | None:
        """Reports an evaluation and keeps the best weights; whether there is no more to be gained, None if it was to stop."""
        try:
            with torch.no_grad(), products("fp32"):
                figures = evaluate(self.head.eval())
        except Interrupted:
            return None
        finally:
            self.head.train()
        self.reporter.line({"step": self.step, "steps": self.plan.steps, "evaluation": figures})
        settings, acceptance = self.settings, figures.get("acceptance")
        if self.best.hear(acceptance, self.step, settings.patience_gain):
            place = snapshot.place_for(self.ranks.device, self._bytes())
            self.writer.submit(best.write, self.folder, snapshot.apart(self.trained, place), self.step, acceptance)
        if not settings.patience or self.best.worse_since < settings.patience:
            return False
        self.reporter.note(
            f"acceptance has not grown by more than {settings.patience_gain} for {counted(self.best.worse_since, 'evaluations')}: "
            f"training ends after step {self.step} of {self.plan.steps}"
        )
        return True

    def take_best(self) -> None:
        """Puts the weights of the best evaluation into the head, where they are not its own already."""
        self.writer.wait()
        if not (self.settings.keep_best and self.ranks.first and self.best.acceptance and self.best.step != self.step):
            return
        weights = best.read(self.folder, self.best.step)
        if weights is None:
            self.reporter.note(f"the best weights, of step {self.best.step}, are not there any more: the head keeps its last ones")
            return
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights[name])
        self.reporter.note(f"the head ends with the weights of step {self.best.step}, acceptance {self.best.acceptance:.3f}")

    # ------------------------------------------------------------------ checkpoints

    def _stop(self) -> NoReturn:
        self.save()
        self.writer.wait()
        told = f"Training was stopped after step {self.step} of {self.plan.steps}; everything is saved"
        raise Interrupted(told, remedy="run the same command again to continue")

    def save(self) -> float:
        """Sets everything aside and lets it be written in the background; the seconds that training stood still for it."""
        self._settle()
        if self.step == 0:
            return 0.0
        began = time.perf_counter()
        place = snapshot.place_for(self.ranks.device, 3 * self._bytes())  # weights and two moments
        moments = self.update.moments(place)
        if self.ranks.first:
            self._write(place, moments)
        seconds = time.perf_counter() - began
        self.stood += seconds
        return seconds

    def _bytes(self) -> int:
        return sum(p.nbytes for p in self.trained.values())

    def _write(self, place: torch.device, moments: dict[str, Tensor]) -> None:
        weights = {**self.trained, "d2t": self.head.d2t, "t2d": self.head.t2d}
        rng = {"cpu": torch.get_rng_state()}
        if self.cuda:
            rng["cuda"] = torch.cuda.get_rng_state()
        cursor = self.plan.cursor(self.step)
        state = {
            "step": self.step, "cursor": asdict(cursor), "tokens": self.tokens, "bad_steps": self.bad_steps,
            "threads": torch.get_num_threads(), "identity": self.identity,
            "usual_loss": float(self.update.usual), "best": asdict(self.best), "finished": self.finished, "judged": self.judged,
            "scheduler": {"learning_rate": learning_rate(self.step, self.plan.steps, self.settings, self.warm)},
        }  # fmt: skip
        self.writer.save({"weights": snapshot.apart(weights, place), "optimizer": moments, "rng": rng}, state)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Takes over a checkpoint; MustFix where it was made with settings that give another result."""
        checkpoint.refuse_changes(saved.state["identity"], self.identity, self.reporter.note)
        weights = self.ranks.tensors_of_first(lambda: saved.tensors("weights"))
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights.pop(name))
        self.head.d2t.copy_(weights.pop("d2t"))
        self.head.t2d.copy_(weights.pop("t2d"))
        assert not weights, f"a checkpoint with unknown tensors: {sorted(weights)}"
        self.update.restore(self.ranks.tensors_of_first(lambda: saved.tensors("optimizer")), saved.state["usual_loss"])
        self.best, self.finished = best.Best(**saved.state["best"]), saved.state["finished"]
        if self.ranks.first:
            rng = saved.tensors("rng")
            torch.set_rng_state(rng["cpu"])
            if self.cuda and "cuda" in rng:
                torch.cuda.set_rng_state(rng["cuda"])
        self.step, self.tokens, self.bad_steps = (saved.state[key] for key in ("step", "tokens", "bad_steps"))
        self.judged = saved.state.get("judged", self.step)  # an older one was written after its evaluation
        self.reporter.note(f"training continues after step {self.step} of {self.plan.steps}")

    @cached_property
    def identity(self) -> dict[str, Any]:
        return checkpoint.identity(self.settings, self.seed, self.warm, self.plan.cut.pieces, self.store.layout, self.head)

    def result(self, saved: checkpoint.Checkpoint | None) -> TrainResult:
        cut = self.plan.cut
        return TrainResult(
            steps=self.step, tokens=self.tokens, processes=self.ranks.world, bad_steps=self.bad_steps, seconds=time.perf_counter() - self.began,
            first_step_seconds=self.first_step, resumed_from=saved.step if saved else None, loss=self.last_loss, pieces=len(cut.pieces),
            split_samples=cut.split_samples, dropped_pieces=cut.dropped_pieces, dropped_rows=cut.dropped_rows,
            padding=self.plan.padding_share, checkpoint=checkpoint.name_of(self.step),
            best_step=self.best.step if self.best.acceptance else None, best_acceptance=self.best.acceptance,
            stopped_early=self.finished and self.step < self.plan.steps, checkpoint_seconds=self.stood,
        )  # fmt: skip
